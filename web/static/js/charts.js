// Draws the page's charts with uPlot from `series` events. A null is a gap: never bridged, never zero.
// Each event carries the points that changed since the last one: {from, columns, rows: [[at, …], …]}.
(() => {
  const STYLES = { 1: [], 2: [6, 3], 3: [2, 2], 4: [6, 3], 5: [6, 3] };
  const COLUMN_LABEL = { seconds: "s", rate: "/s", tokens: "tok/s", ratio: "%" };
  let points = new Map(); // at → {column: value or null}
  let charts = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function text(unit, value) {
    if (value === null || value === undefined) return "—";
    if (unit === "ratio") return `${Number((value * 100).toFixed(1))} %`;
    if (unit === "seconds") return value < 0.9995 ? `${digits(value * 1000)} ms` : `${digits(value)} s`;
    return `${digits(value)} ${COLUMN_LABEL[unit]}`;
  }

  function digits(value) {
    if (value === 0) return "0";
    if (value >= 999.5) return Math.round(value).toLocaleString("en");
    return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value < 0.005 ? "<0.01" : value.toFixed(2);
  }

  // An axis has one unit, that of its largest tick, and as many decimals as tell its ticks apart.
  function axisTexts(unit) {
    return (plot, ticks) => {
      const top = Math.max(...ticks);
      const [scale, suffix] = unit === "ratio" ? [100, " %"] : unit !== "seconds" ? (top >= 10000 ? [0.001, "k"] : [1, ""]) : top < 1 ? [1000, " ms"] : [1, " s"];
      const step = ticks.length > 1 ? (ticks[1] - ticks[0]) * scale : top * scale;
      const places = [0, 1, 2].find((each) => Math.abs(step - Number(step.toFixed(each))) < step / 100) ?? 3;
      return ticks.map((tick) => `${(tick * scale).toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places })}${suffix}`);
    };
  }

  // What the last label of the time axis may need beyond the plot, in pixels: half of it, in the reader's font and locale.
  function halfALabel(font) {
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = font;
    const widths = [0, 12, 20, 22].map((hour) => pen.measureText(new Date(2000, 0, 1, hour, 48, 48).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" })).width);
    return Math.ceil(Math.max(...widths) / 2);
  }

  // A point with a gap on both sides would be invisible as a line: show it as a dot.
  function lonely(plot, index, show, gaps) {
    const values = plot.data[index];
    const [from, to] = plot.series[0].idxs;
    const found = [];
    for (let i = from; i <= to; i++) {
      if (values[i] !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null) found.push(i);
    }
    return found;
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.unit = figure.dataset.chart;
      this.plotBox = figure.querySelector("[data-plot]");
      this.lines = [...figure.querySelectorAll("[data-line]")].map((item) => ({
        name: item.dataset.line,
        label: item.dataset.label,
        style: item.dataset.style,
        output: item.querySelector("[data-value]"),
      }));
      this.table = figure.querySelector("details");
      this.table.addEventListener("toggle", () => this.fillTable());
      this.resize = new ResizeObserver(() => this.fit());
      this.resize.observe(figure);
      this.draw();
    }

    data() {
      const times = [...points.keys()].sort((a, b) => a - b);
      return [times, ...this.lines.map(({ name }) => times.map((at) => points.get(at)[name] ?? null))];
    }

    build() {
      this.plot?.destroy();
      const font = `11px ${css("--font-sans")}`;
      const axis = { stroke: css("--muted-foreground"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font };
      const unit = this.unit;
      this.plot = new uPlot({
        width: this.plotBox.clientWidth,
        height: this.plotBox.clientHeight,
        legend: { show: false },
        padding: [null, halfALabel(font), null, null],
        cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
        scales: { x: { time: true }, y: { range: (_, low, high) => [0, unit === "ratio" ? Math.min(1, Math.max(0.1, high * 1.1)) : high > 0 ? high * 1.1 : 1] } },
        axes: [
          { ...axis, size: 26, values: (_, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: points.size < 30 ? "2-digit" : undefined })), space: 80 },
          { ...axis, size: 56, space: 26, values: axisTexts(unit) },
        ],
        series: [{}, ...this.lines.map(({ label, style }) => {
          const stroke = css(`--series-${style}`);
          return { label, stroke, width: 1.75, dash: STYLES[style], spanGaps: false, points: { show: true, size: 5, fill: stroke, filter: lonely } };
        })],
        hooks: { setCursor: [(plot) => this.legend(plot.cursor.idx)] },
      }, this.data(), this.plotBox);
    }

    draw() {
      const data = this.data();
      const empty = !data.slice(1).some((values) => values.some((value) => value !== null));
      this.figure.toggleAttribute("data-empty", empty);
      if (!empty && this.plotBox.clientWidth > 0) {
        if (this.plot) this.plot.setData(data);
        else this.build();
      }
      this.legend(this.plot?.cursor.idx ?? null);
      this.describe(data);
      if (this.table.open) this.fillTable();
    }

    // The legend shows the values under the cursor, else the newest ones.
    legend(index) {
      const data = this.data();
      this.lines.forEach(({ output }, i) => {
        const values = data[i + 1];
        const value = index === null ? values.findLast((each) => each !== null) : values[index];
        output.textContent = text(this.unit, value);
      });
    }

    describe(data) {
      const parts = this.lines.map(({ label }, i) => {
        const known = data[i + 1].filter((value) => value !== null);
        if (!known.length) return `${label} no points`;
        return `${label} now ${text(this.unit, known.at(-1))}, between ${text(this.unit, Math.min(...known))} and ${text(this.unit, Math.max(...known))}`;
      });
      this.plotBox.setAttribute("aria-label", `${this.plotBox.dataset.label}: ${parts.join("; ")}. The points are in the table below.`);
    }

    fillTable() {
      const box = this.figure.querySelector("[data-points]");
      if (!this.table.open) return box.replaceChildren();
      const data = this.data();
      const table = document.createElement("table");
      table.className = "table";
      const head = table.createTHead().insertRow();
      for (const label of ["Time", ...this.lines.map((line) => line.label)]) {
        const cell = head.appendChild(document.createElement("th"));
        cell.scope = "col";
        cell.textContent = label;
      }
      const body = table.createTBody();
      for (let i = data[0].length - 1; i >= 0; i--) {
        const row = body.insertRow();
        const time = row.appendChild(document.createElement("th"));
        time.scope = "row";
        time.textContent = new Date(data[0][i] * 1000).toLocaleTimeString();
        for (const values of data.slice(1)) row.insertCell().textContent = text(this.unit, values[i]);
      }
      box.replaceChildren(table);
    }

    fit() {
      if (!this.plot) return this.draw();
      const width = this.plotBox.clientWidth;
      if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.plotBox.clientHeight });
    }

    restyle() {
      if (this.plot) this.build();
    }

    close() {
      this.resize.disconnect();
      this.plot?.destroy();
    }
  }

  function take(event) {
    const { from, columns, rows } = JSON.parse(event.data);
    for (const [at, ...values] of rows) {
      points.set(at, Object.fromEntries(columns.map((column, i) => [column, values[i]])));
    }
    for (const at of points.keys()) if (at < from) points.delete(at);
    for (const chart of charts) chart.draw();
  }

  function start(root) {
    const figures = root.matches?.("figure[data-chart]") ? [root] : root.querySelectorAll("figure[data-chart]");
    if (!figures.length) return;
    for (const chart of charts) chart.close();
    points = new Map();
    charts = [...document.querySelectorAll("figure[data-chart]")].map((figure) => new Chart(figure));
  }

  document.addEventListener("htmx:sseBeforeMessage", (event) => {
    if (!event.target.matches("[data-series-feed]")) return;
    event.preventDefault(); // data, not markup: nothing to swap
    take(event.detail);
    document.dispatchEvent(new CustomEvent("tidegate:series"));
  });
  document.addEventListener("tidegate:theme", () => charts.forEach((chart) => chart.restyle()));
  document.addEventListener("htmx:load", (event) => start(event.target));
})();
