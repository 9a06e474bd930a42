// A run's page, live or frozen: its curves, and what page.js shares with them.
'use strict';
const $ = id => document.getElementById(id);
const el = (tag, props = {}, ...kids) => {
  const e = Object.assign(document.createElement(tag), props);
  e.append(...kids);
  return e;
};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const embedded = $('data'); // the whole picture, in a page that is frozen
const MOST_POINTS = 6000; // of a curve that grows; then the server thins it again
const runs = new Map(); // key -> {head, happened, tables, zoomed}
let shown = []; // keys whose curves are drawn; the rest of the page is about the first
let axis = 'step',
  charts = new Map(),
  zoom = null;
window.lag = []; // seconds from the end of a step to its being on the screen

// --- numbers
const digits = (v, n = 4) => String(+(+v).toPrecision(n));
const scaled = (v, units, step) => {
  let i = 0;
  while (Math.abs(v) >= step && i < units.length - 1) {
    v /= step;
    i++;
  }
  return digits(v) + units[i];
};
const clock = s =>
  Math.abs(s) < 1
    ? digits(s * 1e3, 3) + ' ms'
    : Math.abs(s) < 120
      ? digits(s, 3) + ' s'
      : Math.abs(s) < 7200
        ? Math.floor(s / 60) + 'm ' + String(Math.round(s % 60)).padStart(2, '0') + 's'
        : digits(s / 3600, 4) + ' h';
const FORMATS = {
  number: v => digits(v),
  count: v => scaled(v, ['', 'K', 'M', 'B', 'T'], 1000),
  percent: v => digits(v * 100, 3) + ' %',
  seconds: clock,
  bytes: v => scaled(v, [' B', ' KiB', ' MiB', ' GiB', ' TiB'], 1024),
  rate: v => scaled(v, [' B/s', ' kB/s', ' MB/s', ' GB/s'], 1000),
  celsius: v => digits(v, 3) + ' °C',
  watts: v => digits(v, 3) + ' W',
};
const format = (kind, v) => (v == null || !isFinite(v) ? 'unknown' : FORMATS[kind](v));
const COLOURS = ['--train', '--held', '--evaluate', '--m-saving', '--lost', '--bad', '--m-master-copy', '--base'];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const colour = i => css(COLOURS[i % COLOURS.length]);
const dash = i => DASHES[Math.floor(i / COLOURS.length) % DASHES.length];

// --- curves
/** Seconds of running until a moment, without the time between the parts of a resumed run. */
const running = (run, at) =>
  run.happened.parts.reduce((sum, [start, end]) => sum + Math.max(0, Math.min(at, end ?? at) - start), 0);
const xOf = (run, table) => {
  if (axis === 'step') return table.step;
  let most = 0;
  return table.at.map(at => (most = Math.max(most, running(run, at))));
};
const tableOf = (run, name) =>
  (run.zoomed ?? run.tables).find(t => name in t.curves) ?? run.tables.find(t => name in t.curves);
/** Mean of the values around each, fewer near the ends, so that it does not lag. Unknown stays unknown. */
function smooth(ys) {
  if (ys.length < 30) return ys;
  const half = Math.max(4, (ys.length / 40) | 0),
    sums = [0],
    counts = [0];
  ys.forEach((y, i) => {
    sums.push(sums[i] + (y ?? 0));
    counts.push(counts[i] + (y != null));
  });
  return ys.map((y, i) => {
    const reach = Math.min(half, Math.max(i, 1), Math.max(ys.length - 1 - i, 1)),
      a = Math.max(0, i - reach),
      b = Math.min(ys.length, i + reach + 1);
    return y == null ? null : (sums[b] - sums[a]) / (counts[b] - counts[a] || 1);
  });
}
/** Tables to join, and the series drawn from them, of one chart. */
function layers(chart) {
  const tables = [],
    series = [
      {
        label: axis === 'step' ? 'step' : 'time',
        value: (u, v) => (v == null ? '' : axis === 'step' ? Math.round(v).toLocaleString() : clock(v)),
      },
    ],
    bands = [];
  const one = shown.length === 1,
    value = (u, v) => (v == null ? '' : format(chart.kind, v));
  shown.forEach((key, i) => {
    const run = runs.get(key),
      table = run && tableOf(run, chart.name);
    if (!table) return;
    const curve = table.curves[chart.name],
      x = xOf(run, table),
      line = {
        stroke: () => (one ? css('--train') : colour(i)),
        width: 1.8,
        dash: one ? [] : dash(i),
        value,
        points: { show: x.length < 3 },
      };
    const smoothed = smooth(curve.mean);
    if (one && curve.low) {
      tables.push([x, curve.high, curve.low, smoothed]);
      const n = series.length;
      bands.push({ series: [n, n + 1], fill: () => css('--train') + '33' });
      series.push(
        { label: 'largest', width: 0, points: { show: false }, value },
        { label: 'smallest', width: 0, points: { show: false }, value },
        { ...line, label: 'mean' },
      );
    } else if (one && x.length >= 30) {
      tables.push([x, curve.mean, smoothed]);
      series.push(
        { label: 'each step', stroke: () => css('--train') + '66', width: 1, points: { show: false }, value },
        { ...line, label: 'smoothed' },
      );
    } else {
      tables.push([x, smoothed]);
      series.push({ ...line, label: one ? chart.title : run.head.name });
    }
    const dots = one && chart.name === 'train/loss' && tableOf(run, 'eval/loss');
    if (dots) {
      tables.push([xOf(run, dots), dots.curves['eval/loss'].mean]);
      series.push({
        label: 'evaluation',
        stroke: () => css('--held'),
        width: 1.4,
        points: { show: true, size: 6, fill: () => css('--held') },
        value,
        spanGaps: true,
      });
    }
  });
  return { tables, series, bands };
}
const joined = tables => (tables.length ? uPlot.join(tables) : [[]]);
const near = (v, low, high) => (v > 0 && low > 0 ? v <= high * 2.5 && v >= low / 2.5 : v >= low && v <= high);
function range(chart) {
  const expected = [...(chart.band ?? []), ...chart.lines.map(l => l[0])];
  return (u, low, high) => {
    if (low == null) return [0, 1];
    const reach = expected.filter(v => near(v, low, high));
    low = Math.min(low, ...reach);
    high = Math.max(high, ...reach);
    if (u.scales.y.distr === 3) return [low * 0.9, high * 1.1];
    const span = high - low,
      pad = (span > Math.abs(high) * 1e-6 ? span : Math.abs(high) || 1) * 0.06;
    /* a constant is a line, not the noise of its digits */ return [
      low >= 0 ? Math.max(0, low - pad) : low - pad,
      high + pad,
    ];
  };
}
/** Behind the curves: what was predicted, failures, recoveries with their phases, repeated steps. */
function behind(u, chart) {
  const g = u.ctx,
    box = u.bbox,
    x = v => u.valToPos(v, 'x', true),
    y = v => Math.max(box.top, Math.min(box.top + box.height, u.valToPos(v, 'y', true)));
  const stretch = (a, b, fill, alpha) => {
    const left = Math.max(box.left, x(a)),
      right = Math.min(box.left + box.width, Math.max(x(b), x(a) + 1));
    if (right > left) {
      g.globalAlpha = alpha;
      g.fillStyle = fill;
      g.fillRect(left, box.top, right - left, box.height);
      g.globalAlpha = 1;
    }
  };
  const upright = (v, ink, pattern = []) => {
    const at = x(v);
    if (at >= box.left && at <= box.left + box.width) {
      g.strokeStyle = ink;
      g.setLineDash(pattern);
      g.beginPath();
      g.moveTo(at, box.top);
      g.lineTo(at, box.top + box.height);
      g.stroke();
      g.setLineDash([]);
    }
  };
  g.save();
  if (chart.band) {
    g.fillStyle = css('--train') + '22';
    g.fillRect(box.left, y(chart.band[1]), box.width, Math.max(1, y(chart.band[0]) - y(chart.band[1])));
  }
  g.strokeStyle = css('--base');
  g.setLineDash([6, 5]);
  for (const [v] of chart.lines)
    if (v >= u.scales.y.min && v <= u.scales.y.max) {
      g.beginPath();
      g.moveTo(box.left, y(v));
      g.lineTo(box.left + box.width, y(v));
      g.stroke();
    }
  g.setLineDash([]);
  if (shown.length === 1) {
    const run = runs.get(shown[0]),
      { failures, recoveries, repeated, stragglers } = run.happened.marks;
    if (axis === 'step') {
      for (const r of repeated) stretch(r.from, r.to, css('--lost'), 0.25);
      for (const f of failures) upright(f.step, css('--bad'));
      for (const s of stragglers) upright(s.step, css('--warn'), [2, 4]);
    } else {
      for (const r of recoveries)
        for (const p of r.phases) stretch(running(run, p.at), running(run, p.at + p.seconds), css('--' + p.key), 0.55);
      for (const f of failures) upright(running(run, f.at), css('--bad'));
      for (const s of stragglers) upright(running(run, s.at), css('--warn'), [2, 4]);
    }
    for (const a of run.happened.alerts ?? [])
      upright(axis === 'step' ? a.step : running(run, a.at), css('--warn'), [6, 3]);
  }
  g.restore();
}
function caption(chart) {
  const parts = [];
  if (chart.band) parts.push(`shaded: the plan expects ${chart.band.map(v => format(chart.kind, v)).join(' to ')}`);
  for (const [v, what] of chart.lines) parts.push(`${what} ${format(chart.kind, v)}`);
  return parts.join('; ');
}
function build(chart, box) {
  const { tables, series, bands } = layers(chart),
    data = joined(tables);
  const known = data
      .slice(1)
      .flat()
      .filter(v => v != null),
    low = known.reduce((a, b) => Math.min(a, b), Infinity),
    high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const lines = {
    stroke: () => css('--muted'),
    grid: { stroke: () => css('--line'), width: 1 },
    ticks: { stroke: () => css('--line') },
  };
  const plot = new uPlot(
    {
      width: Math.max(280, box.clientWidth),
      height: 220,
      series,
      bands,
      legend: { show: shown.length === 1 },
      cursor: { sync: { key: 'all' } },
      scales: {
        x: { time: false },
        y: { range: range(chart), distr: chart.name === 'train/loss' && low > 0 && high / low > 30 ? 3 : 1 },
      },
      axes: [
        { ...lines, values: (u, vs) => vs.map(v => (axis === 'step' ? (v % 1 ? '' : v.toLocaleString()) : clock(v))) },
        { ...lines, size: 78, values: (u, vs) => vs.map(v => (v == null ? '' : format(chart.kind, v))) },
      ],
      hooks: {
        drawClear: [u => behind(u, chart)],
        setSelect: [
          u => {
            if (u.select.width > 0)
              zoomTo(u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x'));
          },
        ],
        ready: [u => u.over.addEventListener('dblclick', () => zoomTo(null))],
      },
    },
    data,
    box,
  );
  box.setAttribute('aria-label', `${chart.title}: newest ${format(chart.kind, latest(chart.name))}`);
  return plot;
}
const latest = name => {
  const run = runs.get(shown[0]),
    ys = run && tableOf(run, name)?.curves[name].mean;
  return ys?.findLast(v => v != null);
};
/** Every chart that a shown run has; with several runs, evaluations have a chart of their own. */
function wanted() {
  const all = new Map();
  for (const key of shown)
    for (const chart of runs.get(key)?.head.charts ?? [])
      if (!all.has(chart.name)) all.set(chart.name, shown.length === 1 ? chart : { ...chart, band: null, lines: [] });
  if (shown.length > 1 && shown.some(key => runs.has(key) && tableOf(runs.get(key), 'eval/loss')))
    all.set('eval/loss', { name: 'eval/loss', title: 'Evaluation loss', kind: 'number', band: null, lines: [] });
  return [...all.values()];
}
let shape = '';
function drawCharts() {
  const list = wanted(),
    now = JSON.stringify([
      axis,
      shown.map(key => [
        key,
        runs.get(key)?.tables.map(t => [t.step.length >= 30, Object.values(t.curves)[0]?.low != null]),
      ]),
      list,
    ]);
  if (now !== shape) {
    shape = now;
    charts.forEach(c => c.destroy());
    charts = new Map();
    const boxes = list.map(chart => {
      const note = caption(chart);
      return [
        chart,
        el(
          'figure',
          { className: 'chart', role: 'img' },
          el('h3', { textContent: chart.title }),
          ...(note ? [el('p', { className: 'quiet', textContent: note })] : []),
        ),
      ];
    });
    $('charts').replaceChildren(...boxes.map(([, box]) => box)); // all of them first: a row shares its width
    for (const [chart, box] of boxes) charts.set(chart.name, build(chart, box));
    drawLegend();
  } else
    for (const chart of list) {
      const plot = charts.get(chart.name),
        data = joined(layers(chart).tables);
      if (zoom)
        plot.batch(() => {
          plot.setData(data, false);
          plot.setScale('x', { min: zoom[0], max: zoom[1] });
        });
      else plot.setData(data);
    }
}
function drawLegend() {
  const item = (name, text) => {
    const swatch = el('span', { className: 'swatch' });
    swatch.style.background = name;
    return el('li', {}, swatch, text);
  };
  if (shown.length > 1) {
    $('curves-legend').replaceChildren(...shown.map((key, i) => item(colour(i), runs.get(key)?.head.name ?? key)));
    return;
  }
  const { failures, repeated, recoveries, stragglers } = runs.get(shown[0]).happened.marks,
    phases = new Map(recoveries.flatMap(r => r.phases).map(p => [p.key, p.name])),
    items = [];
  if (failures.length) items.push(item('var(--bad)', 'a rank was lost'));
  if (stragglers.length) items.push(item('var(--warn)', 'a rank was slow'));
  if (axis === 'step' && repeated.length) items.push(item('var(--lost)', 'steps that were repeated'));
  if (axis === 'time')
    for (const [key, name] of phases) items.push(item(`var(--${key})`, `recovery: ${name.toLowerCase()}`));
  $('curves-legend').replaceChildren(...items);
}
let asking = 0;
function zoomTo(low, high) {
  zoom = low == null || high <= low ? null : [low, high];
  for (const plot of charts.values())
    plot.setScale('x', zoom ? { min: zoom[0], max: zoom[1] } : { min: plot.data[0][0], max: plot.data[0].at(-1) });
  clearTimeout(asking);
  asking = setTimeout(sharpen, 150);
}
/** The stretch that is looked at, with as many points as the whole had. */
async function sharpen() {
  const mine = zoom;
  for (const key of shown) {
    const run = runs.get(key),
      table = run.tables[0];
    run.zoomed = null;
    if (!mine || embedded || !Object.values(table.curves).some(c => c.low)) continue;
    const x = xOf(run, table),
      at = v => {
        const i = x.findIndex(each => each >= v);
        return table.step[i < 0 ? x.length - 1 : i];
      };
    const answer = await ask(`run/${encodeURIComponent(key)}/curves?first=${at(mine[0])}&last=${at(mine[1])}`);
    if (zoom !== mine) return;
    run.zoomed = answer;
  }
  drawCharts();
}
