// Rewrites <time data-local> from UTC into the reader's own time zone, also in swapped fragments.
(() => {
  const styles = {
    clock: new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" }),
    day: new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" }),
  };

  function rewrite(root) {
    const found = root.querySelectorAll("time[data-local]");
    for (const time of found) {
      time.title = time.dateTime;
      time.textContent = styles[time.dataset.local].format(new Date(time.dateTime));
      time.removeAttribute("data-local");
    }
  }

  rewrite(document);
  document.addEventListener("htmx:load", (event) => rewrite(event.target));
  document.addEventListener("htmx:sseMessage", (event) => rewrite(event.target));
})();
