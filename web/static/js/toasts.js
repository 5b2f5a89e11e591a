// Readers of the screen are told what changes in the toaster, not what a page came with: that is taken out and put in once
// the page is there.
(() => {
  const toaster = document.getElementById("toaster");
  const toasts = [...toaster.children];
  if (toasts.length === 0) return;
  toaster.replaceChildren();
  window.addEventListener("load", () => toaster.append(...toasts), { once: true });
})();
