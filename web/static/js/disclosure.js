// <details data-focus-first>: when the reader opens it, its first field gets the focus. One that is open from the
// start, as a refused form is, or that the browser opens while searching the page, leaves the focus alone.
(() => {
  let opening = null;

  document.addEventListener("click", (event) => {
    const details = event.target.closest("summary")?.parentElement;
    opening = details?.matches("[data-focus-first]:not([open])") ? details : null;
  });

  // Toggle does not bubble: it is caught on its way down.
  document.addEventListener("toggle", (event) => {
    if (event.target !== opening) return;
    opening = null;
    event.target.querySelector("input:not([type=hidden]), select, textarea")?.focus();
  }, true);
})();
