// The phone's top menu: one button opens and closes it, Escape closes it and gives the focus back.
(() => {
  const button = document.querySelector("[data-menu]");
  const menu = document.getElementById("menu");

  function show(open) {
    menu.toggleAttribute("data-open", open);
    button.setAttribute("aria-expanded", String(open));
  }

  button.addEventListener("click", () => show(!menu.hasAttribute("data-open")));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.hasAttribute("data-open")) return;
    show(false);
    button.focus();
  });
})();
