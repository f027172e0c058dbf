// Runs before the page is drawn, so that a dark page does not flash. "light", "dark", or nothing: as the system has it.
try {
  document.documentElement.dataset.theme = localStorage.getItem("deltic.theme") ?? "";
} catch { /* a browser that keeps nothing */ }
