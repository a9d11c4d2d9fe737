"use strict";
(function () {
  const page = JSON.parse(document.getElementById("farstate-charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const buttons = [...document.querySelectorAll("[data-arm]")];
  const views = new Map();
  let picked = new Set();
  let range = "near";

  const shown = () => page.arms.filter((arm) => picked.size === 0 || picked.has(arm));

  /** The range of a metric over the arms that are shown, or null when none of them is drawn. */
  function extent(metric) {
    const byArm = page.extents[metric] || {};
    const parts = shown().map((arm) => byArm[arm] && byArm[arm][range]).filter(Boolean);
    if (parts.length === 0) return null;
    return [Math.min(...parts.map((part) => part[0])), Math.max(...parts.map((part) => part[1]))];
  }

  /** Steer a chart by those of the page's signals that it has. */
  function apply(chart) {
    const view = views.get(chart.id);
    if (!view) return Promise.resolve();
    const known = new Set((chart.spec.params || []).map((parameter) => parameter.name));
    const limits = extent(chart.metric) || [];
    const wanted = { shown: shown(), x_low: range === "near" ? chart.near : 1, y_low: limits[0], y_high: limits[1] };
    for (const [name, value] of Object.entries(wanted)) {
      if (known.has(name) && value !== undefined && value !== null) view.signal(name, value);
    }
    return view.runAsync();
  }

  function update() {
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(picked.size === 0 || picked.has(button.dataset.arm)));
    }
    for (const button of document.querySelectorAll("[data-range]")) {
      button.setAttribute("aria-pressed", String(button.dataset.range === range));
    }
    return Promise.all(page.charts.map(apply));
  }

  function setDark(value) {
    for (const view of views.values()) view.signal("dark", value).run();
  }

  /* A click leaves one arm (again: all of them); with shift, control or a finger it adds or removes one. */
  function pick(arm, several) {
    if (several) {
      const next = new Set(picked.size === 0 && shown().length === page.arms.length ? [] : picked);
      if (next.has(arm)) next.delete(arm);
      else next.add(arm);
      picked = next.size === page.arms.length ? new Set() : next;
    } else {
      picked = picked.size === 1 && picked.has(arm) ? new Set() : new Set([arm]);
    }
    return update();
  }

  for (const button of buttons) {
    button.addEventListener("click", (event) =>
      pick(button.dataset.arm, event.shiftKey || event.ctrlKey || event.metaKey || event.pointerType === "touch"));
  }
  for (const button of document.querySelectorAll("[data-range]")) {
    button.addEventListener("click", () => { range = button.dataset.range; return update(); });
  }
  const all = document.querySelector("[data-all]");
  if (all) all.addEventListener("click", () => { picked = new Set(); return update(); });

  /** One record per curve, with lists in it, to one record per point. */
  function rows(curves) {
    return curves.flatMap((curve) => {
      const lists = Object.keys(curve).filter((key) => Array.isArray(curve[key]));
      return curve[lists[0]].map((_, number) => ({ ...curve, ...Object.fromEntries(lists.map((key) => [key, curve[key][number]])) }));
    });
  }

  const draw = async (chart) => {
    const place = document.getElementById(chart.id);
    try {
      const spec = { ...chart.spec, data: { name: "rows", values: rows(chart.curves) } };
      const result = await window.vegaEmbed(place, spec, {
        mode: "vega-lite",
        renderer: "svg",
        actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
        downloadFileName: "farstate-" + chart.id,
        tooltip: { theme: "custom", offsetX: 12, offsetY: 12 },
        defaultStyle: true,
      });
      views.set(chart.id, result.view);
      result.view.signal("dark", dark.matches);
      await apply(chart);
    } catch (error) {
      place.textContent = "This chart could not be drawn: " + error.message + ". Its numbers are in the data table below.";
      place.classList.add("problem");
      throw error;
    }
  };
  Promise.allSettled(page.charts.map(draw)).then((results) => {
    document.documentElement.dataset.drawn = String(results.filter((result) => result.status === "fulfilled").length);
  });

  dark.addEventListener("change", (event) => setDark(event.matches));
  window.addEventListener("beforeprint", () => setDark(false));
  window.addEventListener("afterprint", () => setDark(dark.matches));
})();
