// Draws the charts and maps of a report from the JSON in the page. Texts go in as text and never as HTML.
(() => {
  "use strict";

  const data = JSON.parse(document.getElementById("report-data").textContent);
  const [ROWS, COLUMNS] = data.grid;
  const several = data.runs.length > 1;
  const DASHES = ["", "5 3", "2 2"];
  const SVG = "http://www.w3.org/2000/svg";

  // From dark blue to pale yellow: lightness grows all the way, and no two colours differ by red against green.
  const HEAT = [[16, 24, 66], [28, 66, 118], [34, 112, 138], [70, 156, 138], [150, 193, 116], [222, 214, 120], [253, 242, 190]];

  // --- Small tools ---------------------------------------------------------------------------------------------------

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null));
    return node;
  }

  function draw(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function bytes(base64) {
    return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  }

  function compact(value, digits = 4) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e").replace("-", "−");
    if (size >= 1000) return Math.round(value).toLocaleString("en-GB");
    return String(Number(value.toPrecision(digits))).replace("-", "−");
  }

  function seriesClass(run) {
    return `series-${run % 8}`;
  }

  function dash(run) {
    return DASHES[Math.floor(run / 8) % DASHES.length];
  }

  function swatch(run) {
    const line = draw("path", { d: "M1 5H27" });
    if (dash(run)) line.setAttribute("stroke-dasharray", dash(run));
    return draw("svg", { class: `swatch ${seriesClass(run)}`, viewBox: "0 0 28 10", "aria-hidden": "true" }, line);
  }

  let loaded = false;

  function announce(text) {
    if (loaded) document.getElementById("announce").textContent = text;
  }

  function place(patch) {
    return `row ${Math.floor(patch / COLUMNS) + 1}, column ${(patch % COLUMNS) + 1}`;
  }

  function runName(run) {
    return make("bdi", {}, data.runs[run]);
  }

  // --- Charts --------------------------------------------------------------------------------------------------------

  // Ticks are pairs of a number and its text, with as many decimals for all of them as the distance between two asks for.
  function niceTicks(low, high, count, whole) {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(whole ? 1 : 0, power * (rough < 1.5 * power ? 1 : rough < 3 * power ? 2 : rough < 7 * power ? 5 : 10));
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) {
      const tick = number * step;
      ticks.push([tick, number === 0 || decimals > 5 || Math.abs(tick) >= 1000 ? compact(tick) : tick.toFixed(decimals).replace("-", "−")]);
    }
    return ticks;
  }

  function logTicks(low, high, count) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.max(1, Math.ceil((last - first) / (count + 1)));
    let ticks = [];
    for (const factors of [[1], [1, 3], [1, 2, 5]]) {
      ticks = [];
      for (let power = first; power <= last; power += every) for (const factor of factors) ticks.push(factor * 10 ** power);
      ticks = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
      if (ticks.length >= 3 || every > 1) break;
    }
    return ticks.length >= 2 ? ticks.map((tick) => [tick, compact(tick)]) : niceTicks(low, high, count);
  }

  function scale(values, logarithmic, start, end, roomy) {
    let [low, high] = [Math.min(...values), Math.max(...values)];
    const padded = roomy && !logarithmic;
    if (!logarithmic && low > 0 && low < (roomy ? 0.5 : 0.1) * high) low = 0;
    if (low === high) [low, high] = logarithmic ? [low / 2, high * 2] : [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    else if (padded) [low, high] = [low && low - (high - low) * 0.05, high + (high - low) * 0.05];
    const bend = logarithmic ? Math.log : (value) => value;
    const position = (value) => start + ((bend(value) - bend(low)) / (bend(high) - bend(low))) * (end - start);
    position.ticks = (count) => (logarithmic ? logTicks : niceTicks)(low, high, count, !roomy);
    return position;
  }

  const hidden = new Set();
  const charts = [];

  class Chart {
    constructor(spec, parent) {
      this.spec = spec;
      this.log = new Set(spec.log || []);
      this.frame = make("div", { class: "frame" });
      this.tooltip = make("div", { class: "tooltip", hidden: true });
      const caption = make("figcaption", {}, spec.title, spec.meaning ? make("span", { class: "hint" }, spec.meaning) : null);
      parent.append(make("figure", { class: "chart" }, caption, this.frame));
      this.at = null;
      this.redraw();
      let width = this.frame.clientWidth;
      new ResizeObserver(() => {
        if (this.frame.clientWidth === width) return;
        width = this.frame.clientWidth;
        this.redraw();
      }).observe(this.frame);
    }

    get shown() {
      return this.spec.series.filter((one) => !hidden.has(one.run));
    }

    summary() {
      const parts = this.shown.map((one) => {
        const [first, last] = [0, one.x.length - 1];
        const span = `${compact(one.y[first])} at ${this.spec.x} ${compact(one.x[first])} to ${compact(one.y[last])} at ${compact(one.x[last])}`;
        return several ? `${data.runs[one.run]}: ${span}` : span;
      });
      return `${this.spec.title}. ${parts.join("; ")}. Left and right arrow keys read the values.`;
    }

    redraw() {
      const width = Math.max(240, this.frame.clientWidth || 320);
      const height = width > 560 ? 270 : 190;
      const margin = { left: 54, right: 10, top: 8, bottom: 36 };
      const points = this.shown;
      const xs = points.flatMap((one) => one.x);
      const ys = points.flatMap((one) => one.y);
      const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img", "aria-label": this.summary() });
      if (xs.length) {
        const x = scale(xs, this.log.has("x"), margin.left, width - margin.right, false);
        const y = scale(ys, this.log.has("y"), height - margin.bottom, margin.top, true);
        this.box = { x, y, width, height, margin };
        for (const [tick, text] of y.ticks(4)) {
          svg.append(draw("line", { class: "rule", x1: margin.left, x2: width - margin.right, y1: y(tick), y2: y(tick) }));
          svg.append(draw("text", { x: margin.left - 8, y: y(tick) + 4, "text-anchor": "end" }, text));
        }
        for (const [tick, text] of x.ticks(Math.min(8, Math.floor(width / 75)))) {
          svg.append(draw("line", { class: "axis", x1: x(tick), x2: x(tick), y1: height - margin.bottom, y2: height - margin.bottom + 4 }));
          svg.append(draw("text", { x: x(tick), y: height - margin.bottom + 17, "text-anchor": "middle" }, text));
        }
        svg.append(draw("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom }));
        svg.append(draw("text", { x: width - margin.right, y: height - 4, "text-anchor": "end" }, this.spec.x));
        for (const one of points) svg.append(this.curve(one, x, y));
      } else {
        svg.append(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "all runs are hidden"));
      }
      this.pointer = draw("g", { "aria-hidden": "true" });
      svg.append(this.pointer);
      this.listen(svg);
      this.frame.replaceChildren(svg, this.tooltip);
      this.hide();
    }

    curve(one, x, y) {
      if (one.x.length === 1) return draw("circle", { class: `dot ${seriesClass(one.run)}`, cx: x(one.x[0]), cy: y(one.y[0]), r: 4 });
      const path = one.x.map((value, number) => `${number ? "L" : "M"}${x(value).toFixed(1)} ${y(one.y[number]).toFixed(1)}`).join("");
      const attributes = { class: `curve ${seriesClass(one.run)}`, d: path };
      if (dash(one.run)) attributes["stroke-dasharray"] = dash(one.run);
      return draw("path", attributes);
    }

    listen(svg) {
      svg.addEventListener("pointermove", (event) => this.point(svg, event));
      svg.addEventListener("pointerdown", (event) => this.point(svg, event));
      svg.addEventListener("pointerleave", () => this.hide());
      svg.addEventListener("blur", () => this.hide());
      svg.addEventListener("focus", () => svg.matches(":focus-visible") && this.step(0, true));
      svg.addEventListener("keydown", (event) => {
        const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
        if (event.key === "Escape") this.hide();
        else if (steps !== undefined) this.step(steps, true);
        else return;
        event.preventDefault();
      });
    }

    get stops() {
      return [...new Set(this.shown.flatMap((one) => one.x))].sort((one, other) => one - other);
    }

    point(svg, event) {
      if (!this.shown.length) return;
      const bounds = svg.getBoundingClientRect();
      const at = ((event.clientX - bounds.left) / bounds.width) * this.box.width;
      const stops = this.stops;
      const distance = (stop) => Math.abs(this.box.x(stop) - at);
      this.show(stops.reduce((best, stop) => (distance(stop) < distance(best) ? stop : best)));
    }

    step(by, spoken) {
      const stops = this.stops;
      if (!stops.length) return;
      const now = this.at === null ? stops.length - 1 : stops.findIndex((stop) => stop >= this.at);
      this.show(stops[Math.min(stops.length - 1, Math.max(0, now + by))]);
      if (spoken) announce(this.tooltip.textContent);
    }

    show(stop) {
      const { x, y, width, height, margin } = this.box;
      this.at = stop;
      const rows = [];
      const marks = [draw("line", { class: "cross", x1: x(stop), x2: x(stop), y1: margin.top, y2: height - margin.bottom })];
      for (const one of this.shown) {
        const number = one.x.reduce((best, value, index) => (Math.abs(value - stop) < Math.abs(one.x[best] - stop) ? index : best), 0);
        if (stop < one.x[0] || stop > one.x[one.x.length - 1]) continue;
        marks.push(draw("circle", { class: `dot ${seriesClass(one.run)}`, cx: x(one.x[number]), cy: y(one.y[number]), r: 4.5 }));
        const name = make("span", { class: "name" }, several ? runName(one.run) : this.spec.title);
        rows.push(make("div", {}, several ? swatch(one.run) : null, name, " ", make("span", { class: "value" }, compact(one.y[number]))));
      }
      this.pointer.replaceChildren(...marks);
      this.tooltip.replaceChildren(make("div", {}, make("span", { class: "hint" }, `${this.spec.x} ${compact(stop)} `)), ...rows);
      this.tooltip.hidden = false;
      const left = (x(stop) / width) * 100;
      this.tooltip.style.left = left > 50 ? "auto" : `calc(${left}% + 12px)`;
      this.tooltip.style.right = left > 50 ? `calc(${100 - left}% + 12px)` : "auto";
    }

    hide() {
      this.at = null;
      this.tooltip.hidden = true;
      this.pointer.replaceChildren();
    }
  }

  function drawCharts() {
    for (const parent of document.querySelectorAll("[data-charts]")) {
      for (const spec of data.charts.filter((one) => one.section === parent.dataset.charts)) charts.push(new Chart(spec, parent));
    }
  }

  function drawLegends() {
    const legends = [...document.querySelectorAll("[data-legend]")];
    for (const legend of legends) {
      data.runs.forEach((_, run) => {
        const button = make("button", { type: "button", "aria-pressed": "true", "data-run": run }, swatch(run), runName(run));
        button.addEventListener("click", () => {
          if (!hidden.delete(run)) hidden.add(run);
          for (const same of document.querySelectorAll(`[data-legend] [data-run="${run}"]`)) same.setAttribute("aria-pressed", String(!hidden.has(run)));
          charts.forEach((chart) => chart.redraw());
        });
        legend.append(button);
      });
    }
  }

  // --- Maps ----------------------------------------------------------------------------------------------------------

  function heat(part) {
    const at = Math.min(1, Math.max(0, part)) * (HEAT.length - 1);
    const below = Math.min(HEAT.length - 2, Math.floor(at));
    return HEAT[below].map((value, channel) => value + (HEAT[below + 1][channel] - value) * (at - below));
  }

  function paint(canvas, width, height, colourOf) {
    canvas.width = width;
    canvas.height = height;
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    for (let number = 0; number < width * height; number++) {
      image.data.set([...colourOf(number), 255], number * 4);
    }
    context.putImageData(image, 0, 0);
  }

  function mapFrame(...layers) {
    const frame = make("div", { class: "map" }, ...layers);
    frame.style.aspectRatio = `${COLUMNS} / ${ROWS}`;
    return frame;
  }

  function mark(marker, patch) {
    marker.hidden = patch === null;
    if (patch === null) return;
    const [row, column] = [Math.floor(patch / COLUMNS), patch % COLUMNS];
    Object.assign(marker.style, {
      left: `${(column / COLUMNS) * 100}%`, top: `${(row / ROWS) * 100}%`, width: `${100 / COLUMNS}%`, height: `${100 / ROWS}%`,
    });
  }

  function colourScale(low, high) {
    const bar = make("canvas", { "aria-hidden": "true" });
    paint(bar, 64, 1, (number) => heat(number / 63));
    const [from, to] = [make("span", {}, low), make("span", {}, high)];
    return { node: make("div", { class: "scale" }, from, bar, to), set: (a, b) => { from.textContent = a; to.textContent = b; } };
  }

  // A grid of patches over a map: one Tab stop, moved in with the arrow keys; what can be picked is picked on the way.
  class Picker {
    constructor(label, onPick) {
      this.onPick = onPick;
      this.cells = [];
      this.node = make("div", { class: "cells", role: "grid", "aria-label": label });
      this.node.style.gridTemplate = `repeat(${ROWS}, 1fr) / repeat(${COLUMNS}, 1fr)`;
      for (let row = 0; row < ROWS; row++) {
        const line = make("div", { role: "row" });
        for (let column = 0; column < COLUMNS; column++) {
          const patch = row * COLUMNS + column;
          const cell = make("div", { role: "gridcell", tabindex: "-1", "aria-label": place(patch), "data-patch": patch });
          this.cells.push(cell);
          line.append(cell);
        }
        this.node.append(line);
      }
      this.node.addEventListener("click", (event) => this.pick(event.target.closest("[data-patch]")));
      this.node.addEventListener("keydown", (event) => this.key(event));
    }

    allow(isAllowed, classOf = () => "", wordOf = () => "") {
      this.cells.forEach((cell, patch) => {
        cell.className = classOf(patch);
        cell.setAttribute("aria-disabled", String(!isAllowed(patch)));
        cell.setAttribute("aria-label", place(patch) + wordOf(patch));
      });
    }

    select(patch) {
      this.cells.forEach((cell, number) => {
        cell.tabIndex = number === patch ? 0 : -1;
        cell.setAttribute("aria-selected", String(number === patch));
      });
    }

    pick(cell) {
      if (!cell || cell.getAttribute("aria-disabled") === "true") return;
      this.onPick(Number(cell.dataset.patch));
    }

    key(event) {
      const cell = event.target.closest("[data-patch]");
      if (!cell) return;
      const patch = Number(cell.dataset.patch);
      const [row, column] = [Math.floor(patch / COLUMNS), patch % COLUMNS];
      const next = {
        ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
        Home: [row, 0], End: [row, COLUMNS - 1], PageUp: [0, column], PageDown: [ROWS - 1, column], Enter: [row, column], " ": [row, column],
      }[event.key];
      if (!next) return;
      event.preventDefault();
      if (next[0] < 0 || next[0] >= ROWS || next[1] < 0 || next[1] >= COLUMNS) return;
      const there = this.cells[next[0] * COLUMNS + next[1]];
      cell.tabIndex = -1;
      there.tabIndex = 0;
      there.focus();
      this.pick(there);
    }
  }

  function nearestQuery(queries, patch) {
    const distance = (other) =>
      (Math.floor(patch / COLUMNS) - Math.floor(other / COLUMNS)) ** 2 + ((patch % COLUMNS) - (other % COLUMNS)) ** 2;
    return queries.reduce((best, other) => (distance(other) < distance(best) ? other : best));
  }

  function mapWidth(node) {
    node.style.setProperty("--map-width", several ? "16rem" : "20rem");
    node.classList.toggle("fine", COLUMNS > 8);
  }

  function runHeading(run) {
    return several ? make("h3", {}, swatch(run), " ", runName(run)) : null;
  }

  // --- Position similarity -------------------------------------------------------------------------------------------

  function drawPositions(parent) {
    const readout = make("p", { class: "readout" });
    parent.append(readout);
    const low = Math.min(...data.positions.filter(Boolean).map((maps) => maps.low));
    const views = [];
    let current = null;

    function choose(patch) {
      current = patch;
      views.forEach((view) => view(patch));
      readout.replaceChildren(make("strong", {}, "Query: "), place(patch), ".");
      announce(readout.textContent);
    }

    data.positions.forEach((maps, run) => {
      if (!maps) return;
      const figures = make("div", { class: "maps" });
      mapWidth(figures);
      const kinds = { fixed: "Without noise", sample: "One draw with noise", mean: `Mean of ${maps.draws} draws` };
      for (const [kind, title] of Object.entries(kinds)) {
        if (!maps[kind]) continue;
        const levels = bytes(maps[kind]);
        const [canvas, marker] = [make("canvas"), make("div", { class: "marker" })];
        const name = `${title}${several ? `, ${data.runs[run]}` : ""}`;
        const picker = kind === "fixed" ? new Picker(`Query patch. ${name}`, choose) : null;
        if (!picker) canvas.setAttribute("role", "img");
        const frame = mapFrame(canvas, marker, picker ? picker.node : null);
        const hint = make("span", { class: "hint" });
        figures.append(make("figure", {}, make("figcaption", {}, title, hint), frame));
        picker && picker.allow(() => true);
        views.push((patch) => {
          const query = nearestQuery(maps.queries, patch);
          const start = maps.queries.indexOf(query) * ROWS * COLUMNS;
          const valueOf = (number) => maps.low + (levels[start + number] / 255) * (maps.high - maps.low);
          paint(canvas, COLUMNS, ROWS, (number) => heat((valueOf(number) - low) / (1 - low)));
          mark(marker, query);
          hint.textContent = `itself ${valueOf(query).toFixed(2)}, others ${othersMean(valueOf, query).toFixed(2)} on average`;
          if (picker) picker.select(patch);
          else canvas.setAttribute("aria-label", `${name}: ${hint.textContent}`);
        });
      }
      parent.append(make("div", { class: "run-maps" }, runHeading(run), figures));
    });
    parent.append(colourScale(`cosine ${low.toFixed(2)}`, "1").node);
    choose(Math.floor(ROWS / 2) * COLUMNS + Math.floor(COLUMNS / 2));
  }

  function othersMean(valueOf, query) {
    let sum = 0;
    for (let number = 0; number < ROWS * COLUMNS; number++) if (number !== query) sum += valueOf(number);
    return sum / Math.max(1, ROWS * COLUMNS - 1);
  }

  // --- Predictions ---------------------------------------------------------------------------------------------------

  function drawPredictions(parent) {
    const thumbnails = make("div", { class: "pictures", role: "group", "aria-label": "Images" });
    const readout = make("p", { class: "readout" });
    parent.append(thumbnails, readout);
    const views = [];
    let [image, patch] = [0, 0];

    function show() {
      const found = views.map((view) => view(image, patch));
      readout.replaceChildren(make("strong", {}, "Masked patch: "), `image ${image + 1}, ${place(patch)}.`);
      announce(`${readout.textContent} ${found.join(" ")}`);
    }

    function chooseImage(number) {
      image = number;
      [...thumbnails.children].forEach((button, index) => button.setAttribute("aria-pressed", String(index === number)));
      const queries = data.predictions.find(Boolean).images[image].queries;
      patch = queries[Math.floor(queries.length / 2)];
      show();
    }

    data.pictures.forEach((url, number) => {
      const button = make("button", { type: "button", "aria-pressed": "false" }, make("img", { src: url, alt: `Image ${number + 1}` }));
      button.addEventListener("click", () => chooseImage(number));
      thumbnails.append(button);
    });

    data.predictions.forEach((maps, run) => {
      if (!maps) return;
      const view = predictionView(maps, run, (chosen) => { patch = chosen; show(); });
      views.push(view.update);
      parent.append(view.node);
    });
    chooseImage(0);
  }

  function predictionView(maps, run, onPick) {
    const [whole, seen, under] = [make("img", { alt: "The whole image" }), make("img", { alt: "" }), make("img", { alt: "", class: "grey" })];
    const canvas = make("canvas", { class: "over", role: "img" });
    const markers = [make("div", { class: "marker" }), make("div", { class: "marker" }), make("div", { class: "marker best" })];
    const picker = new Picker(`Masked patches${several ? `, ${data.runs[run]}` : ""}`, onPick);
    const bar = colourScale("", "");
    const hint = make("span", { class: "hint" });
    const figures = make(
      "div", { class: "maps" },
      make("figure", {}, make("figcaption", {}, "What the model sees", make("span", { class: "hint" }, "dark patches are predicted")), mapFrame(seen, picker.node, markers[0])),
      make("figure", {}, make("figcaption", {}, "What its prediction is like", hint), mapFrame(under, canvas, markers[2], markers[1]), bar.node),
      make("figure", {}, make("figcaption", {}, "Image"), mapFrame(whole)),
    );
    mapWidth(figures);
    let last = null;

    function update(image, patch) {
      const shown = maps.images[image];
      if (last !== image) {
        const [masked, context] = [new Set(shown.masked), new Set(maps.context[image])];
        whole.src = seen.src = under.src = data.pictures[image];
        picker.allow(
          (number) => masked.has(number),
          (number) => (masked.has(number) ? "masked" : context.has(number) ? "" : "unused"),
          (number) => (masked.has(number) ? ", masked" : context.has(number) ? ", context" : ", not used"),
        );
        last = image;
      }
      const query = nearestQuery(shown.queries, patch);
      const number = shown.queries.indexOf(query);
      const levels = bytes(shown.maps).subarray(number * ROWS * COLUMNS, (number + 1) * ROWS * COLUMNS);
      paint(canvas, COLUMNS, ROWS, (cell) => heat(levels[cell] / 255));
      const best = levels.indexOf(Math.max(...levels));
      picker.select(query);
      mark(markers[0], query);
      mark(markers[1], query);
      mark(markers[2], best);
      bar.set(compact(shown.low[number], 3), compact(shown.high[number], 3));
      hint.textContent = `most like (dashed): ${best === query ? "the patch itself" : place(best)}`;
      const told = `${several ? `${data.runs[run]}: ` : ""}The prediction for ${place(query)} is ${hint.textContent}.`;
      canvas.setAttribute("aria-label", told);
      return told;
    }

    return { update, node: make("div", { class: "run-maps" }, runHeading(run), figures) };
  }

  // --- Features ------------------------------------------------------------------------------------------------------

  function drawFeatures(parent) {
    const shown = data.features.map((maps, run) => [maps, run]).filter(([maps]) => maps);
    parent.style.setProperty("--tile-parts", shown.length + 1);
    parent.style.setProperty("--tile-width", `${shown.length > 1 ? 5.5 * (shown.length + 1) : 14}rem`);
    const names = shown.map(([, run]) => (several ? data.runs[run] : "its features"));
    parent.append(make("p", { class: "gallery-head" }, `From left to right: the image, ${names.join(", ")}.`));
    data.pictures.forEach((url, number) => {
      const tile = make("div", { class: "tile" }, mapFrame(make("img", { src: url, alt: `Image ${number + 1}` })));
      for (const [maps, run] of shown) {
        const canvas = make("canvas", { role: "img", "aria-label": `Principal components of image ${number + 1}${several ? `, ${data.runs[run]}` : ""}` });
        const colours = bytes(maps.maps[number]);
        paint(canvas, COLUMNS, ROWS, (cell) => colours.subarray(cell * 3, cell * 3 + 3));
        tile.append(mapFrame(canvas));
      }
      parent.append(tile);
    });
  }

  drawLegends();
  drawCharts();
  for (const [name, start] of [["positions", drawPositions], ["predictions", drawPredictions], ["features", drawFeatures]]) {
    const parent = document.querySelector(`[data-${name}]`);
    if (parent) start(parent);
  }
  loaded = true;
})();
