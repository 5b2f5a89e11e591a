// A request of htmx that failed shows as a toast; nothing fails silently. Polling regions report for themselves.
(() => {
  const SENTENCES = {
    401: "Your session has ended. Log in again.",
    403: "That was refused. Reload the page and try again; if it stays, your role does not allow it.",
    404: "It is no longer there. Reload the page.",
    429: "Too many tries. Wait a moment.",
    503: "A service behind the console does not answer right now. Try again in a moment.",
  };

  function toast(title, text) {
    const node = document.createElement("div");
    node.className = "toast";
    node.setAttribute("role", "alert");
    node.dataset.category = "error";
    node.dataset.duration = "9000";
    const content = node.appendChild(document.createElement("div"));
    content.className = "toast-content";
    const section = content.appendChild(document.createElement("section"));
    section.appendChild(document.createElement("h2")).textContent = title;
    section.appendChild(document.createElement("p")).textContent = text;
    document.getElementById("toaster").append(node);
  }

  const polled = (event) => event.detail.elt?.getAttribute("hx-trigger")?.startsWith("every");

  document.addEventListener("htmx:responseError", (event) => {
    if (polled(event)) return;
    const status = event.detail.xhr.status;
    toast("Not done", SENTENCES[status] || `The server answered ${status}.`);
  });
  document.addEventListener("htmx:sendError", (event) => {
    if (!polled(event)) toast("Not sent", "The control plane cannot be reached.");
  });
})();
