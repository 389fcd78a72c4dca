// Keeps open what the reader opened when a part of the page is replaced.
let opened = [];
document.addEventListener("htmx:sseBeforeMessage", (event) => {
  opened = Array.from(event.target.querySelectorAll("details[open]"), (details) => details.id);
});
document.addEventListener("htmx:sseMessage", () => {
  for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
});

// Says so if news cannot arrive. A stream that ended by its age is back before that, and is no error.
const LOST_AFTER_MILLISECONDS = 3000;
let lost;
class Stream extends EventSource {
  constructor(url) {
    super(url, { withCredentials: true });
    this.addEventListener("open", () => {
      clearTimeout(lost);
      lost = undefined;
      document.querySelector(".lost").textContent = "";
    });
    this.addEventListener("error", () => {
      const time = new Date().toLocaleTimeString();
      lost ??= setTimeout(() => {
        document.querySelector(".lost").textContent = `Not connected: this is the state of ${time}.`;
      }, LOST_AFTER_MILLISECONDS);
    });
  }
  set onerror(handler) {
    super.onerror = (event) => {
      if (this.readyState === EventSource.CLOSED) handler(event);
    };
  }
}
if (globalThis.htmx) htmx.createEventSource = (url) => new Stream(url);

// Reads out the value at the pointer from the table of a chart.
let shown;
function readOut(svg, clientX) {
  const frame = svg.querySelector(".frame");
  const box = frame.getBoundingClientRect();
  const first = Number(svg.dataset.firstStep);
  const span = Number(svg.dataset.lastStep) - first;
  const wanted = first + (span * (clientX - box.left)) / box.width;
  let nearest;
  for (const row of svg.parentElement.querySelectorAll("tbody tr")) {
    const away = Math.abs(Number(row.cells[0].textContent) - wanted);
    if (!nearest || away < nearest.away) nearest = { away, step: row.cells[0].textContent, value: row.cells[1] };
  }
  const share = span ? (Number(nearest.step) - first) / span : 0.5;
  const x = frame.x.baseVal.value + share * frame.width.baseVal.value;
  shown.guide.setAttribute("x1", x);
  shown.guide.setAttribute("x2", x);
  shown.readout.replaceChildren(`step ${nearest.step}: `, ...nearest.value.cloneNode(true).childNodes);
}
for (const name of ["pointermove", "pointerdown"]) {
  document.addEventListener(name, (event) => {
    const svg = event.target.closest?.("svg[data-first-step]");
    if (shown && shown.svg !== svg) {
      shown.guide.remove();
      shown.readout.replaceChildren(...shown.newest);
      shown = undefined;
    }
    if (!svg) return;
    if (!shown) {
      const guide = document.createElementNS(svg.namespaceURI, "line");
      guide.setAttribute("class", "guide");
      guide.setAttribute("y1", svg.querySelector(".frame").getAttribute("y"));
      guide.setAttribute("y2", svg.querySelector(".label").getAttribute("y") - 28);
      svg.append(guide);
      const readout = svg.parentElement.querySelector(".readout");
      shown = { svg, guide, readout, newest: [...readout.childNodes] };
    }
    readOut(svg, event.clientX);
  });
}

// Ends the stream of news with the page, and shows the present one if the browser kept it.
addEventListener("pagehide", () => {
  const connected = document.querySelector("[sse-connect]");
  if (connected) htmx.trigger(connected, "htmx:beforeCleanupElement");
});
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});
