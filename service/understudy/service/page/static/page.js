// Keeps open what the reader opened when a part of the page is replaced.
let opened = [];
document.addEventListener("htmx:sseBeforeMessage", (event) => {
  opened = Array.from(event.target.querySelectorAll("details[open]"), (details) => details.id);
});
document.addEventListener("htmx:sseMessage", () => {
  for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
});

// Ends the stream of news with the page, and shows the present one if the browser kept it.
addEventListener("pagehide", () => {
  const main = document.querySelector("[sse-connect]");
  if (main) htmx.trigger(main, "htmx:beforeCleanupElement");
});
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});
