// Confirmation dialogs, and focus after a swap: whoever had it must not be left on nothing.
(() => {
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-dialog-open]");
    if (opener) document.getElementById(opener.dataset.dialogOpen).showModal();
    const closer = event.target.closest("[data-dialog-close]");
    if (closer) closer.closest("dialog").close();
  });

  // A click on the backdrop lands on the dialog element itself.
  document.addEventListener("click", (event) => {
    if (event.target instanceof HTMLDialogElement) event.target.close();
  });

  document.addEventListener("htmx:afterSettle", (event) => {
    const wanted = event.target.querySelector?.("[data-focus]");
    if (wanted) wanted.focus();
    else if (document.activeElement === document.body && event.target.hasAttribute?.("tabindex")) event.target.focus();
  });
})();
