// Sets the theme before the first paint and remembers the choice: "light", "dark" or "system".
(() => {
  const KEY = "tidegate-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");

  function choice() {
    try {
      return localStorage.getItem(KEY) || "system";
    } catch {
      return "system"; // storage may be forbidden; the system's theme then holds
    }
  }

  function apply() {
    const chosen = choice();
    const dark = chosen === "dark" || (chosen === "system" && system.matches);
    document.documentElement.classList.toggle("dark", dark);
    for (const button of document.querySelectorAll("[data-theme-choice]")) {
      button.setAttribute("aria-pressed", String(button.dataset.themeChoice === chosen));
    }
    document.dispatchEvent(new CustomEvent("tidegate:theme"));
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", apply);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-theme-choice]");
    if (!button) return;
    try {
      localStorage.setItem(KEY, button.dataset.themeChoice);
    } catch {
      return;
    }
    apply();
  });
})();
