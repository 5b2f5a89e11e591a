// <details data-keep-open> stay as the reader left them when a polled region is replaced.
(() => {
  const kept = new Map();

  document.addEventListener("toggle", (event) => {
    if (event.target.matches?.("details[data-keep-open]") && event.target.isConnected) kept.set(event.target.id, event.target.open);
  }, true);

  document.addEventListener("htmx:afterSwap", () => {
    for (const details of document.querySelectorAll("details[data-keep-open]")) {
      if (kept.has(details.id)) details.open = kept.get(details.id);
    }
  });
})();
