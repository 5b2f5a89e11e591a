// Copy buttons: data-copy names the element whose text goes to the clipboard.
(() => {
  // navigator.clipboard exists in secure contexts only; a console reached over plain HTTP selects and copies.
  async function copy(text, source) {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(text);
      return true;
    }
    getSelection().selectAllChildren(source);
    return document.execCommand("copy");
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.getElementById(button.dataset.copy);
    const label = button.querySelector("[data-copy-label]");
    const before = label.dataset.before || label.textContent;
    label.dataset.before = before;
    let done = false;
    try {
      done = await copy(source.textContent, source);
    } catch {
      getSelection().selectAllChildren(source); // refused: leave it selected for Ctrl-C
    }
    label.textContent = done ? "Copied" : "Press Ctrl-C";
    setTimeout(() => { label.textContent = before; }, 2000);
  });
})();
