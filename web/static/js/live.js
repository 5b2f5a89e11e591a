// Watches the page's live source (server-sent events, or polling): says when it is silent, and speaks a summary
// to screen readers now and then. The server says whether the figures themselves are stale.
(() => {
  const SILENT_MS = 8000;
  const ANNOUNCE_MS = 30000;
  let heard = performance.now();
  let spoken = "";

  const page = () => document.querySelector("[data-live]");

  function silent(message) {
    const root = page();
    const line = root?.querySelector("[data-client-state]");
    if (!line || root.hasAttribute("data-silent")) return;
    root.setAttribute("data-silent", "");
    const since = new Date(Date.now() - (performance.now() - heard)).toLocaleTimeString();
    line.textContent = `${message} Figures are those of ${since}; trying again.`;
    line.hidden = false;
  }

  function alive() {
    heard = performance.now();
    const root = page();
    const line = root?.querySelector("[data-client-state]");
    if (!line || !root.hasAttribute("data-silent")) return;
    root.removeAttribute("data-silent");
    line.textContent = "";
    line.hidden = true;
  }

  // A source closed for good may mean that the session is over: a page request then answers with the login page.
  async function stillLoggedIn() {
    const answer = await fetch("/", { redirect: "manual", headers: { "HX-Request": "true" } });
    return answer.type !== "opaqueredirect" && answer.status !== 401;
  }

  document.addEventListener("htmx:sseMessage", alive);
  document.addEventListener("tidegate:series", alive);
  document.addEventListener("htmx:sseOpen", alive);
  document.addEventListener("htmx:sseError", async (event) => {
    silent("The live connection is lost.");
    if (event.detail.source.readyState !== EventSource.CLOSED) return;
    try {
      if (!(await stillLoggedIn())) location.reload();
    } catch {
      // the control plane itself is away; the source keeps trying
    }
  });
  document.addEventListener("htmx:sseClose", (event) => {
    if (event.detail.type === "message") location.assign("/login");
  });

  document.addEventListener("htmx:afterRequest", (event) => {
    if (!event.detail.elt.getAttribute("hx-trigger")?.startsWith("every")) return;
    if (event.detail.successful) alive();
    else if (event.detail.xhr.status === 401) location.reload();
    else silent("The control plane does not answer.");
  });

  setInterval(() => {
    if (performance.now() - heard > SILENT_MS && !document.hidden) silent("Nothing was heard from the control plane.");
  }, 2000);

  setInterval(() => {
    const output = document.querySelector("[data-announce]");
    if (!output || document.hidden) return;
    const parts = ["requests", "ttft", "kv"].map((key) => {
      const tile = document.querySelector(`[data-stat="${key}"]`);
      return tile && `${tile.querySelector("dt").textContent}: ${tile.querySelector(".stat-value").textContent.trim()}`;
    });
    const summary = parts.filter(Boolean).join("; ");
    if (summary !== spoken) output.textContent = spoken = summary;
  }, ANNOUNCE_MS);
})();
