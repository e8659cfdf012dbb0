// Draws the charts and maps of the report from the JSON in the page. Text is inserted as text, never as HTML.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const [ROWS, COLUMNS] = data.grid;
  const PATCHES = ROWS * COLUMNS;
  const several = data.runs.length > 1;
  const FEW_POINTS = 30;
  // Dark blue to pale yellow with increasing lightness, also for colour-blind readers.
  const HEAT = [[16, 24, 66], [28, 66, 118], [34, 112, 138], [70, 156, 138], [150, 193, 116], [222, 214, 120], [253, 242, 190]];

  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "path", "line", "text", "circle", "g"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  const bytes = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const colour = (run) => `var(--series-${run % 8})`;
  const swatch = (run) => make("span", { class: "swatch", style: `border-top: 0.3em ${["solid", "dashed", "dotted"][Math.min(2, Math.floor(run / 8))]} ${colour(run)}` });
  const dashes = (run) => (run < 8 ? {} : { "stroke-dasharray": run < 16 ? "5 3" : "2 2" });
  const place = (patch) => `row ${Math.floor(patch / COLUMNS) + 1}, column ${(patch % COLUMNS) + 1}`;
  const of = (run) => (several ? `${data.runs[run]}: ` : "");

  function compact(value) {
    const size = Math.abs(value);
    if (value !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en-GB") : String(Number(value.toPrecision(4)));
  }

  // The text of a tick, which is round already.
  function exact(value) {
    const size = Math.abs(value);
    if (value !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential().replace("e+", "e");
    return value.toLocaleString("en-GB", { maximumFractionDigits: 9 });
  }

  // --- Charts ---

  // A scale maps values to pixels; its ticks are round numbers, or powers of ten.
  function scale(values, logarithmic, start, end, room = true) {
    const bend = logarithmic ? Math.log10 : (value) => value;
    let [low, high] = [bend(Math.min(...values)), bend(Math.max(...values))];
    if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
    // The axis shows the change: it begins at zero only where the values come close to it.
    else if (!logarithmic && room) [low, high] = [low > 0 && low < (high - low) / 10 ? 0 : low - (high - low) / 20, high + (high - low) / 20];
    const position = (value) => start + ((bend(value) - low) / (high - low)) * (end - start);
    // Less than a power of ten has the ticks of a linear scale.
    const powers = logarithmic && high - low > 1;
    const [first, last] = logarithmic && !powers ? [10 ** low, 10 ** high] : [low, high];
    const rough = (last - first) / 4;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(powers ? 1 : 0, unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough));
    position.ticks = [];
    for (let tick = Math.ceil(first / step) * step; tick <= last + step / 1e6; tick += step) {
      const value = Number((powers ? 10 ** tick : tick).toPrecision(6));
      position.ticks.push([value, exact(value)]);
    }
    return position;
  }

  const range = (one, index) => (one.low ? ` (${compact(one.low[index])} to ${compact(one.high[index])})` : "");

  const hidden = new Set();
  const charts = [];

  function addChart(spec, parent) {
    const tooltip = make("div", { class: "tooltip", hidden: "" });
    const caption = make("figcaption", {}, spec.title, make("span", { class: "hint" }, spec.meaning));
    const svg = make("svg", { viewBox: "0 0 360 190", role: "img" });
    parent.append(make("figure", {}, tooltip, caption, svg));
    const redraw = () => drawChart(spec, spec.series.filter((one) => !hidden.has(one.run)), svg, tooltip);
    charts.push(redraw);
    redraw();
  }

  // The names of a section's curves, beside them.
  function addLegend(specs, parent) {
    const runs = [...new Set(specs.flatMap((spec) => spec.series.map((one) => one.run)))].sort((one, other) => one - other);
    if (several) parent.append(make("p", { class: "legend" }, ...runs.map((run) => make("span", {}, swatch(run), ` ${data.runs[run]}`))));
  }

  function drawChart(spec, series, svg, tooltip) {
    svg.replaceChildren();
    const ends = series.map((one) => `${of(one.run)}${compact(one.y[0])} to ${compact(one.y.at(-1))}`);
    svg.setAttribute("aria-label", `${spec.title}. ${ends.join("; ")}`);
    if (!series.length) return;
    const x = scale(series.flatMap((one) => one.x), spec.log.includes("x"), 50, 348, false);
    const y = scale(series.flatMap((one) => [...one.y, ...(one.low ?? []), ...(one.high ?? [])]), spec.log.includes("y"), 154, 8);
    for (const [tick, text] of y.ticks) {
      svg.append(make("line", { class: "rule", x1: 50, x2: 352, y1: y(tick), y2: y(tick) }));
      svg.append(make("text", { x: 44, y: y(tick) + 4, "text-anchor": "end" }, text));
    }
    for (const [tick, text] of x.ticks) svg.append(make("text", { x: x(tick), y: 170, "text-anchor": "middle" }, text));
    svg.append(make("text", { x: 352, y: 186, "text-anchor": "end" }, spec.x));
    for (const one of series.filter((one) => one.low)) {
      const edge = (values) => values.map((value, number) => `${x(one.x[number]).toFixed(1)} ${y(value).toFixed(1)}`);
      const d = `M${edge(one.high).join("L")}L${edge(one.low).reverse().join("L")}Z`;
      svg.append(make("path", { class: "band", style: `fill: ${colour(one.run)}`, d }));
    }
    for (const one of series) {
      const points = one.x.map((value, number) => `${x(value).toFixed(1)} ${y(one.y[number]).toFixed(1)}`);
      const style = `stroke: ${colour(one.run)}`;
      svg.append(make("path", { class: "curve", "data-run": one.run, style, d: `M${points.join("L")}`, ...dashes(one.run) }));
      // Few points are marked: between them nothing was measured.
      if (points.length > FEW_POINTS) continue;
      for (const point of points) {
        const [cx, cy] = point.split(" ");
        svg.append(make("circle", { cx, cy, r: 2.8, style: `fill: ${colour(one.run)}` }));
      }
    }
    const cross = make("line", { class: "rule", y1: 8, y2: 154, visibility: "hidden" });
    svg.append(cross);
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * 360;
      const nearest = (values) => values.reduce((best, value, number) => (Math.abs(x(value) - at) < Math.abs(x(values[best]) - at) ? number : best), 0);
      const lines = series.map((one) => [one, nearest(one.x)]);
      const [first, number] = lines[0];
      for (const end of ["x1", "x2"]) cross.setAttribute(end, x(first.x[number]));
      cross.setAttribute("visibility", "visible");
      const values = lines.map(([one, index]) => make("div", { style: `color: ${colour(one.run)}` }, `${of(one.run)}${compact(one.y[index])}${range(one, index)}`));
      tooltip.replaceChildren(`${spec.x} ${compact(first.x[number])}`, ...values);
      tooltip.hidden = false;
    };
    svg.onpointerleave = () => {
      tooltip.hidden = true;
      cross.setAttribute("visibility", "hidden");
    };
  }

  // --- Maps of patches ---

  function heat(part) {
    const at = Math.min(1, Math.max(0, part)) * (HEAT.length - 1);
    const below = Math.min(HEAT.length - 2, Math.floor(at));
    return HEAT[below].map((value, channel) => value + (HEAT[below + 1][channel] - value) * (at - below));
  }

  const rgb = (values) => `rgb(${values.map(Math.round).join(" ")})`;

  // A canvas of patches. With `onPick`, a click or an arrow key chooses a patch.
  class PatchMap {
    constructor(title, onPick = null) {
      this.cell = Math.max(4, Math.floor(320 / COLUMNS));
      const size = { width: COLUMNS * this.cell, height: ROWS * this.cell };
      this.canvas = make("canvas", { class: "map", role: "img", "aria-label": title, ...size });
      this.hint = make("span", { class: "hint" });
      this.node = make("figure", {}, make("figcaption", {}, title, this.hint), this.canvas);
      this.title = title;
      if (onPick) this.listen(onPick);
    }

    listen(onPick) {
      this.canvas.tabIndex = 0;
      this.canvas.addEventListener("click", (event) => {
        const box = this.canvas.getBoundingClientRect();
        const [column, row] = [((event.clientX - box.left) / box.width) * COLUMNS, ((event.clientY - box.top) / box.height) * ROWS];
        onPick(Math.floor(row) * COLUMNS + Math.floor(column), 0);
      });
      this.canvas.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -COLUMNS, ArrowDown: COLUMNS }[event.key];
        if (!step) return;
        event.preventDefault();
        const next = this.at + step;
        const sameRow = Math.floor(next / COLUMNS) === Math.floor(this.at / COLUMNS);
        if (next >= 0 && next < PATCHES && (Math.abs(step) > 1 || COLUMNS === 1 || sameRow)) onPick(next, step);
      });
    }

    // `fill(patch)` is a CSS colour or nothing; marks are pairs of a patch and whether its outline is dashed.
    draw(fill, { picture = null, opacity = 1, marks = [], hint = "" } = {}) {
      const [context, cell] = [this.canvas.getContext("2d"), this.cell];
      context.globalAlpha = 1;
      context.filter = opacity < 1 ? "grayscale(1)" : "none";
      if (picture) context.drawImage(picture, 0, 0, this.canvas.width, this.canvas.height);
      context.filter = "none";
      context.globalAlpha = opacity;
      for (let patch = 0; patch < PATCHES; patch++) {
        const style = fill(patch);
        if (!style) continue;
        context.fillStyle = style;
        context.fillRect((patch % COLUMNS) * cell, Math.floor(patch / COLUMNS) * cell, cell, cell);
      }
      context.globalAlpha = 1;
      for (const [patch, dashed] of marks) {
        context.setLineDash(dashed ? [4, 3] : []);
        for (const [style, width] of [["black", 4], ["white", 2]]) {
          [context.strokeStyle, context.lineWidth] = [style, width];
          context.strokeRect((patch % COLUMNS) * cell + 1, Math.floor(patch / COLUMNS) * cell + 1, cell - 2, cell - 2);
        }
      }
      if (marks.length) this.at = marks[0][0];
      this.hint.textContent = hint;
      this.canvas.setAttribute("aria-label", `${this.title}. ${hint}`);
    }
  }

  function nearest(queries, patch) {
    const distance = (other) => (Math.floor(patch / COLUMNS) - Math.floor(other / COLUMNS)) ** 2 + ((patch % COLUMNS) - (other % COLUMNS)) ** 2;
    return queries.reduce((best, other) => (distance(other) < distance(best) ? other : best));
  }

  // The next query in the direction of an arrow key, or the nearest one to a click.
  function pick(queries, patch, step) {
    for (let next = patch; step && next >= 0 && next < PATCHES; next += step) if (queries.includes(next)) return next;
    return nearest(queries, patch);
  }

  function addRun(parent, run, maps) {
    if (several) parent.append(make("h3", {}, data.runs[run]));
    parent.append(make("div", { class: "maps", style: `--parts: ${Math.max(maps.length, 3)}` }, ...maps.map((map) => map.node)));
  }

  function drawPositions(parent) {
    const readout = make("p", { role: "status" });
    const low = Math.min(...data.positions.filter(Boolean).map((maps) => maps.low));
    const views = [];
    const choose = (patch) => {
      views.forEach((view) => view(patch));
      readout.textContent = `Patch: ${place(patch)}.`;
    };
    parent.append(readout);
    data.positions.forEach((maps, run) => {
      if (!maps) return;
      const kinds = { fixed: "Without noise", sample: "One sample", mean: `Mean of ${maps.draws} samples` };
      const shown = Object.entries(kinds).filter(([kind]) => maps[kind]).map(([kind, title]) => {
        const levels = bytes(maps[kind]);
        const map = new PatchMap(title, kind === "fixed" ? (patch, step) => choose(pick(maps.queries, patch, step)) : null);
        views.push((patch) => {
          const query = nearest(maps.queries, patch);
          const start = maps.queries.indexOf(query) * PATCHES;
          const cosine = (number) => maps.low + (levels[start + number] / 255) * (1 - maps.low);
          const hint = `to itself ${cosine(query).toFixed(2)}`;
          map.draw((number) => rgb(heat((cosine(number) - low) / (1 - low))), { marks: [[query, false]], hint });
        });
        return map;
      });
      addRun(parent, run, shown);
    });
    parent.append(colourBar(`cosine ${low.toFixed(2)} to 1`));
    choose(Math.floor(ROWS / 2) * COLUMNS + Math.floor(COLUMNS / 2));
  }

  function colourBar(text) {
    const stops = HEAT.map(rgb).join(", ");
    return make("div", {}, make("div", { class: "scale", style: `background: linear-gradient(to right, ${stops})` }), make("span", { class: "hint" }, text));
  }

  function drawPredictions(parent, pictures) {
    const readout = make("p", { role: "status" });
    const thumbnails = make("div", { class: "pictures", role: "group", "aria-label": "Images" });
    const views = [];
    let image = 0;
    const choose = (patch) => {
      views.forEach((view) => view(patch));
      readout.textContent = `Image ${image + 1}, masked patch: ${place(patch)}.`;
    };
    const chooseImage = (number) => {
      image = number;
      [...thumbnails.children].forEach((button, index) => button.setAttribute("aria-pressed", index === number));
      const queries = data.predictions.find(Boolean).images[image].queries;
      choose(queries[Math.floor(queries.length / 2)]);
    };
    data.pictures.forEach((src, number) => {
      const button = make("button", { type: "button" }, make("img", { src, alt: `Image ${number + 1}` }));
      button.addEventListener("click", () => chooseImage(number));
      thumbnails.append(button);
    });
    parent.append(thumbnails, readout);
    data.predictions.forEach((maps, run) => {
      if (!maps) return;
      const seen = new PatchMap("Context", (patch, step) => {
        const shown = maps.images[image];
        if (step || shown.masked.includes(patch)) choose(pick(shown.queries, patch, step));
      });
      const predicted = new PatchMap("Prediction");
      const whole = new PatchMap("Image");
      views.push((patch) => {
        const [shown, picture] = [maps.images[image], pictures[image]];
        const query = nearest(shown.queries, patch);
        const number = shown.queries.indexOf(query);
        const levels = bytes(shown.maps).subarray(number * PATCHES, (number + 1) * PATCHES);
        const best = levels.indexOf(Math.max(...levels));
        const [masked, context] = [new Set(shown.masked), new Set(maps.context[image])];
        const shade = (one) => (masked.has(one) ? "rgb(8 12 20 / 86%)" : context.has(one) ? null : "rgb(255 255 255 / 70%)");
        seen.draw(shade, { picture, marks: [[query, false]], hint: "dark: predicted" });
        const hint = `highest: ${best === query ? "itself" : place(best)}`;
        predicted.draw((one) => rgb(heat(levels[one] / 255)), { picture, opacity: 0.75, marks: [[query, false], [best, true]], hint });
        whole.draw(() => null, { picture });
      });
      addRun(parent, run, [seen, predicted, whole]);
    });
    parent.append(colourBar("similarity of each patch to the prediction, from the lowest to the highest of its map"));
    chooseImage(0);
  }

  function drawFeatures(parent, pictures) {
    const shown = data.features.flatMap((maps, run) => (maps ? [[maps, run]] : []));
    parent.style.setProperty("--parts", shown.length + 1);
    const names = shown.map(([, run]) => (several ? data.runs[run] : "its features"));
    parent.append(make("p", { class: "hint" }, `From left to right: the image, ${names.join(", ")}.`));
    pictures.forEach((picture, number) => {
      const image = new PatchMap(`Image ${number + 1}`);
      image.draw(() => null, { picture });
      const maps = shown.map(([features, run]) => {
        const colours = bytes(features[number]);
        const map = new PatchMap(`${of(run)}features of image ${number + 1}`);
        map.draw((patch) => rgb([...colours.subarray(patch * 3, patch * 3 + 3)]));
        return map;
      });
      parent.append(make("div", {}, ...[image, ...maps].map((map) => map.canvas)));
    });
  }

  async function load(src) {
    const image = new Image();
    image.src = src;
    await image.decode();
    return image;
  }

  for (const parent of document.querySelectorAll("[data-charts]")) {
    const specs = data.charts.filter((spec) => spec.section === parent.dataset.charts);
    addLegend(specs, parent);
    for (const spec of specs) addChart(spec, parent);
  }
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", !hidden.has(run));
      charts.forEach((redraw) => redraw());
    });
  }
  Promise.all(data.pictures.map(load)).then((pictures) => {
    const sections = { positions: drawPositions, predictions: drawPredictions, features: drawFeatures };
    for (const parent of document.querySelectorAll("[data-maps]")) sections[parent.dataset.maps](parent, pictures);
    document.body.dataset.ready = "";
  });
})();
