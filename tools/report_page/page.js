"use strict";
(() => {
  const root = document.documentElement;
  root.dataset.errors = "0";
  addEventListener("error", () => { root.dataset.errors = String(Number(root.dataset.errors) + 1); });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => { root.dataset.theme = theme; };
  show(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => show(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => {
    show(root.dataset.theme === "dark" ? "light" : "dark");
  });

  const charts = JSON.parse(document.getElementById("points").textContent);

  // Index of the point whose place is nearest; places rise.
  const nearest = (points, place) => {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][1] < place) { low = middle; } else { high = middle; }
    }
    return Math.abs(points[low][1] - place) <= Math.abs(points[high][1] - place) ? low : high;
  };

  for (const card of document.querySelectorAll("[data-chart]")) {
    const chart = charts[Number(card.dataset.chart)];
    const picture = card.querySelector("svg");
    const cursor = card.querySelector(".cursor");
    const values = card.querySelectorAll(".legend b");
    const step = card.querySelector(".step");
    const forget = () => {
      cursor.style.visibility = "hidden";
      step.textContent = "";
      for (const value of values) { value.textContent = ""; }
    };
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width) * picture.viewBox.baseVal.width;
      chart.lines.forEach((line, index) => {
        if (!line.points.length) { return; }
        const point = line.points[nearest(line.points, place)];
        values[index].textContent = point[2];
        if (index === 0) {
          cursor.setAttribute("x1", point[1]);
          cursor.setAttribute("x2", point[1]);
          cursor.style.visibility = "visible";
          step.textContent = `iteration ${point[0]}`;
        }
      });
    });
    picture.addEventListener("pointerleave", forget);
  }
  root.dataset.ready = String(document.querySelectorAll("[data-chart]").length);
})();
