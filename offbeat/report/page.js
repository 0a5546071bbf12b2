// Draws the charts of a report. vl-convert bundles it with Vega, Vega-Lite and Vega-Embed, of which it has the last as
// `vegaEmbed`.
const { config, charts } = JSON.parse(document.getElementById("specifications").textContent);
const tip = document.createElement("div");
tip.id = "tip";
document.body.append(tip);
addEventListener("scroll", () => { tip.style.display = "none"; }, { passive: true });

// The values of a mark, beside the pointer.
function showTip(_, event, item, value) {
  tip.replaceChildren();
  for (const [name, text] of Object.entries(value && typeof value === "object" ? value : {})) {
    if (text === "" || text === "null" || text === "NaN") continue;
    const line = document.createElement("div"), key = document.createElement("span");
    key.textContent = name + " ";
    line.append(key, text);
    tip.append(line);
  }
  tip.style.display = tip.childElementCount ? "block" : "none";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY > box.height + 24 ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
}

// A chart that is hidden in a folded section has no width yet: it is drawn when the section is opened.
const views = new Map();
const options = { config, renderer: "svg", actions: false, defaultStyle: false, tooltip: showTip };
function draw() {
  for (const place of document.querySelectorAll(".chart")) {
    if (views.has(place) || !place.clientWidth) continue;
    views.set(place, null);
    vegaEmbed(place, charts[place.id], options).then(({ view }) => { views.set(place, view); view.resize().run(); });
  }
}

// Vega sets the width of a chart; with it the rows of the legend change, and so does the height.
addEventListener("resize", () => { for (const view of views.values()) if (view) view.resize().runAsync(); });

draw();
document.addEventListener("toggle", () => { draw(); dispatchEvent(new Event("resize")); }, true);
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const each of folded) each.open = true;
  draw();
});
addEventListener("afterprint", () => { for (const each of folded) each.open = false; });
