"use strict";
(function () {
  const { groups } = JSON.parse(document.getElementById("farstate-charts").textContent);
  const root = document.documentElement;
  const ground = window.matchMedia("(prefers-color-scheme: dark)");
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const charts = groups.flatMap((group) =>
    group.charts.map((chart) => ({ ...chart, group, place: document.getElementById(chart.id), view: null, drawing: null, seen: false, stale: false })));
  for (const group of groups) {
    group.element = all("[data-group]").find((element) => element.tagName !== "BUTTON" && element.dataset.group === group.name);
    group.models = new Set(group.charts.map((chart) => chart.model).filter(Boolean));
    group.picked = new Set();
  }
  let arms = new Set();
  let models = new Set();
  let range = "near";
  let printing = false;

  /* ---- What is shown ---- */

  /** The arms a group shows: those its own legend picks, else those picked for all groups, else all. */
  function shown(group) {
    const picked = group.picked.size ? group.picked : arms;
    const found = group.arms.filter((arm) => picked.has(arm));
    return found.length ? found : group.arms;
  }

  /** The range of a metric over the arms that are shown, or nothing when none of them is drawn. */
  function extent(chart) {
    const byArm = chart.group.extents[chart.metric] || {};
    const parts = shown(chart.group).map((arm) => byArm[arm] && byArm[arm][range]).filter(Boolean);
    return parts.length ? [Math.min(...parts.map((part) => part[0])), Math.max(...parts.map((part) => part[1]))] : [];
  }

  /** Steer a chart by those of the page's signals that it has. */
  function apply(chart) {
    chart.stale = false;
    const known = new Set((chart.spec.params || []).map((parameter) => parameter.name));
    const [low, high] = extent(chart);
    const wanted = { dark: ground.matches && !printing, shown: shown(chart.group), x_low: range === "near" ? chart.near : 1, y_low: low, y_high: high };
    for (const [name, value] of Object.entries(wanted)) {
      if (known.has(name) && value !== undefined) chart.view.signal(name, value);
    }
    return chart.view.runAsync();
  }

  /** Charts in sight at once, the others when they come into sight. */
  function applyAll() {
    return Promise.all(charts.filter((chart) => chart.view).map((chart) => {
      chart.stale = true;
      return chart.seen || printing ? apply(chart) : null;
    }));
  }

  function say(group, sentence) {
    let note = group.element.querySelector("[data-missing]");
    if (!note && sentence) {
      note = document.createElement("p");
      note.className = "small missing";
      note.dataset.missing = "";
      const heading = group.element.querySelector("h1, h2, h3");
      if (heading) heading.after(note);
      else group.element.prepend(note);
    }
    if (note) [note.textContent, note.hidden] = [sentence, !sentence];
    group.element.classList.toggle("lacking", Boolean(sentence));
  }

  const label = (kind, name) => {
    const button = all(`button[data-${kind}]`).find((each) => each.dataset[kind] === name);
    return button ? button.textContent.trim() : name;
  };
  const labels = (kind, names) => [...names].map((name) => label(kind, name)).join(", ");

  function update() {
    for (const button of all("button[data-arm]")) {
      const group = groups.find((each) => each.name === button.dataset.group);
      const on = group ? shown(group).includes(button.dataset.arm) : arms.size === 0 || arms.has(button.dataset.arm);
      button.setAttribute("aria-pressed", String(on));
    }
    for (const button of all("button[data-model]")) {
      button.setAttribute("aria-pressed", String(models.size === 0 || models.has(button.dataset.model)));
    }
    for (const button of all("[data-range]")) button.setAttribute("aria-pressed", String(button.dataset.range === range));
    for (const group of groups.filter((each) => each.element)) {
      const held = [...models].some((model) => group.models.has(model));
      for (const panel of all("[data-panel][data-model]", group.element)) {
        panel.hidden = held && panel.dataset.model !== "" && !models.has(panel.dataset.model);
      }
      const missing = [];
      if (models.size && !held) missing.push(labels("model", models));
      if (arms.size && !group.arms.some((arm) => arms.has(arm))) missing.push(labels("arm", arms));
      say(group, missing.length ? `Not in this figure: ${missing.join("; ")}. All of it is shown.` : "");
    }
    const status = document.querySelector("[data-status]");
    if (status) {
      status.textContent = `Shown: ${arms.size ? labels("arm", arms) : "all arms"}${models.size ? `; ${labels("model", models)}` : ""}.`;
    }
    return applyAll();
  }

  /* ---- Picking ---- */

  /* A click leaves one (again: all of them); with shift, control or a finger it adds or removes one. */
  function toggled(picked, name, choices, several) {
    if (!several) return picked.size === 1 && picked.has(name) ? new Set() : new Set([name]);
    const next = new Set(picked);
    if (!next.delete(name)) next.add(name);
    return choices.every((choice) => next.has(choice)) ? new Set() : next;
  }

  const several = (event) => event.shiftKey || event.ctrlKey || event.metaKey || event.pointerType === "touch";

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const { arm, model, group: name } = button.dataset;
    const group = groups.find((each) => each.name === name);
    const choices = (kind) => all(`button[data-${kind}]`).filter((each) => each.dataset.group === name).map((each) => each.dataset[kind]);
    if (arm !== undefined && group) group.picked = toggled(group.picked, arm, choices("arm"), several(event));
    else if (arm !== undefined) arms = toggled(arms, arm, choices("arm"), several(event));
    else if (model !== undefined) models = toggled(models, model, choices("model"), several(event));
    else if (button.dataset.range !== undefined) range = button.dataset.range;
    else if (button.dataset.all !== undefined && group) group.picked = new Set();
    else if (button.dataset.all !== undefined) {
      [arms, models] = [new Set(), new Set()];
      for (const each of groups) each.picked = new Set();
    } else return;
    keep();
    update();
  });

  /* ---- The address keeps what is picked, so that it can be sent: #arms=…&models=…&range=all&in.fig5=… ---- */

  function keep() {
    const list = (names) => [...names].map(encodeURIComponent).join(",");
    const parts = [
      ...(arms.size ? [`arms=${list(arms)}`] : []),
      ...(models.size ? [`models=${list(models)}`] : []),
      ...(range === "near" ? [] : [`range=${range}`]),
      ...groups.filter((group) => group.picked.size).map((group) => `in.${encodeURIComponent(group.name)}=${list(group.picked)}`),
    ];
    if (parts.length || location.hash.includes("=")) {
      history.replaceState(null, "", location.href.split("#")[0] + (parts.length ? `#${parts.join("&")}` : ""));
    }
  }

  /** Take over what the address says, as far as the page has it; an address of a place on the page says nothing. */
  function recall() {
    if (!location.hash.includes("=")) return false;
    const said = new Map();
    for (const part of location.hash.slice(1).split("&")) {
      const [name, value = ""] = part.split("=");
      try {
        said.set(decodeURIComponent(name), value.split(",").filter(Boolean).map(decodeURIComponent));
      } catch {
        continue; // not an encoding: as if it were not there
      }
    }
    const known = (names, choices) => new Set((names || []).filter((name) => choices.includes(name)));
    arms = known(said.get("arms"), groups.flatMap((group) => group.arms));
    models = known(said.get("models"), groups.flatMap((group) => [...group.models]));
    range = (said.get("range") || [])[0] === "all" ? "all" : "near";
    for (const group of groups) group.picked = known(said.get(`in.${group.name}`), group.arms);
    return true;
  }

  window.addEventListener("hashchange", () => { if (recall()) update(); });

  /* ---- Drawing ---- */

  /** One record per curve, with lists in it, to one record per point. */
  function rows(curves) {
    return curves.flatMap((curve) => {
      const lists = Object.keys(curve).filter((key) => Array.isArray(curve[key]));
      return curve[lists[0]].map((_, number) => ({ ...curve, ...Object.fromEntries(lists.map((key) => [key, curve[key][number]])) }));
    });
  }

  /**
   * The cells that catch the pointer near a mark hold its row in `datum.datum`. Vega-Lite 6 writes that for numbers only, so that a
   * tooltip there says "undefined" for every text (mended in its pull request 9707); where it writes it for all, this changes nothing.
   */
  function mended(part) {
    if (Array.isArray(part)) part.forEach(mended);
    else if (part && typeof part === "object") {
      if (part.type === "path" && String(part.name).endsWith("voronoi")) {
        const { tooltip } = part.encode.update;
        if (tooltip && tooltip.signal) tooltip.signal = tooltip.signal.replace(/(?<!datum\.)\bdatum\[/g, "datum.datum[");
      }
      Object.values(part).forEach(mended);
    }
    return part;
  }

  async function embed(chart) {
    const { place } = chart;
    try {
      const spec = { ...chart.spec, data: { name: "rows", values: rows(chart.curves) } };
      const result = await window.vegaEmbed(place, spec, {
        mode: "vega-lite",
        renderer: "svg",
        actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
        downloadFileName: "farstate-" + chart.id,
        tooltip: { theme: "custom", offsetX: 12, offsetY: 12 },
        defaultStyle: true,
        patch: mended,
      });
      chart.view = result.view;
      const picture = place.querySelector("svg.marks");
      picture.setAttribute("role", "img");
      picture.removeAttribute("aria-roledescription");
      picture.setAttribute("aria-label", place.dataset.text);
      const menu = place.querySelector("summary");
      if (menu) menu.setAttribute("aria-label", "Save this chart as SVG or PNG");
      await apply(chart);
      root.dataset.drawn = String(Number(root.dataset.drawn) + 1);
      if (!root.dataset.firstDrawn) root.dataset.firstDrawn = String(Math.round(performance.now()));
      sizes.observe(place);
    } catch (error) {
      place.textContent = "This chart could not be drawn: " + error.message + ". Its numbers are in the data table below.";
      place.classList.add("problem");
      throw error;
    }
  }

  const draw = (chart) => { chart.drawing = chart.drawing || embed(chart); return chart.drawing; };
  const visible = (chart) => chart.place && chart.place.checkVisibility();

  /* One after the other, with room between them for the reader's scrolling and clicks. */
  const waiting = [];
  let busy = false;
  async function work() {
    if (busy) return;
    busy = true;
    while (waiting.length) {
      const chart = waiting.shift();
      if (!chart.drawing) await draw(chart).catch((error) => console.error(error));
      await new Promise((done) => setTimeout(done));
    }
    busy = false;
  }

  const byPlace = new Map(charts.map((chart) => [chart.place, chart]));
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = byPlace.get(target);
      chart.seen = isIntersecting;
      if (!isIntersecting) continue;
      if (!chart.drawing) waiting.push(chart);
      else if (chart.view && chart.stale) apply(chart);
    }
    work();
  }, { rootMargin: "500px 0px" });

  /* The library follows the window only; a chart's column also changes when panels are hidden. */
  const sizes = new ResizeObserver((entries) => {
    if (printing) return;
    for (const { target } of entries) {
      const chart = byPlace.get(target);
      const width = target.clientWidth;
      if (width && chart.spec.width === "container" && chart.view.signal("width") !== width) chart.view.signal("width", width).runAsync();
    }
  });

  ground.addEventListener("change", applyAll);
  /* Paper cannot unfold. Drawing waits for no task of the browser, so that it is done before the paper is laid out. */
  let unfolded = [];
  window.addEventListener("beforeprint", () => {
    printing = true;
    unfolded = all("details:not([open])").filter((fold) => fold.dataset.print !== undefined || fold.querySelector(".chart"));
    for (const fold of unfolded) fold.open = true;
    applyAll();
    for (const chart of charts.filter(visible)) draw(chart);
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    for (const fold of unfolded) fold.open = false;
    applyAll();
  });

  [root.dataset.charts, root.dataset.drawn] = [String(charts.length), "0"];
  recall();
  update();
  const first = charts.find(visible);
  if (first) waiting.push(first);
  work();
  for (const chart of charts.filter((each) => each.place)) sight.observe(chart.place);
})();
