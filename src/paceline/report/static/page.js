// A run's page, live or frozen: all but its curves (curves.js). Text of a run is only ever set as text:
// log lines are not trusted.
'use strict';

// --- ranks
const GRID = {
  training: '--train',
  starting: '--startup',
  recovering: '--restore',
  stopping: '--warn',
  ended: '--good',
  unknown: '--rest',
  slow: '--lost',
  stuck: '--bad',
  lost: '--detect',
  corrupt: '--m-saving',
};
// A phase that an agent saw; all that come before the first step look alike.
const PHASES = {
  forward: '--forward',
  backward: '--backward',
  vote: '--vote',
  apply: '--apply',
  boundary: '--data',
  save: '--save',
  evaluate: '--evaluate',
  restoring: '--restore',
  ending: '--ending',
};
const phaseColour = name => PHASES[name] ?? '--startup';
let cell = 0,
  columns = 1,
  picked = -1;
const ranks = () => runs.get(shown[0])?.happened.ranks;
function drawGrid() {
  const all = ranks(),
    canvas = $('grid');
  $('ranks').hidden = !all?.num;
  if (!all?.num) return;
  const width = canvas.clientWidth,
    ratio = devicePixelRatio || 1,
    room = Math.min(360, Math.max(40, width / 3));
  cell = Math.max(3, Math.min(26, Math.floor(Math.sqrt((width * room) / all.num))));
  columns = Math.max(1, Math.floor(width / cell));
  if (columns > all.per_node) columns -= columns % all.per_node; // a node stays in one row
  const height = Math.ceil(all.num / columns) * cell,
    gap = cell > 5 ? 1 : 0,
    g = canvas.getContext('2d');
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + 'px';
  }
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  const place = i => [(i % columns) * cell, Math.floor(i / columns) * cell],
    usual = new Path2D();
  for (let i = 0; i < all.num; i++) usual.rect(...place(i), cell - gap, cell - gap);
  g.fillStyle = css(GRID[all.usual]);
  g.fill(usual);
  for (const [name, seen] of Object.entries(all.phases)) {
    const cells = new Path2D();
    for (const i of seen) cells.rect(...place(i), cell - gap, cell - gap);
    g.fillStyle = css(phaseColour(name));
    g.fill(cells);
  }
  for (const odd of all.odd) {
    // its state is shape too, not colour alone
    const [x, y] = place(odd.rank),
      end = cell - gap;
    g.fillStyle = css(GRID[odd.state]);
    g.fillRect(x, y, end, end);
    g.strokeStyle = css('--ink');
    g.lineWidth = 1.5;
    g.strokeRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
    if (odd.state !== 'slow') {
      g.beginPath();
      g.moveTo(x, y);
      g.lineTo(x + end, y + end);
      if (odd.state === 'lost') {
        g.moveTo(x + end, y);
        g.lineTo(x, y + end);
      }
      g.stroke();
    }
  }
  if (picked >= 0) {
    const [x, y] = place(picked);
    g.strokeStyle = css('--ink');
    g.lineWidth = 2.5;
    g.strokeRect(x, y, cell, cell);
  }
}
function drawRanks() {
  const all = ranks();
  if (!all?.num) {
    drawGrid();
    return;
  }
  const counts = new Map();
  for (const odd of all.odd) counts.set(odd.state, (counts.get(odd.state) ?? 0) + 1);
  const seen = Object.entries(all.phases).sort();
  const states = [...counts].map(([state, n]) => `, ${n} ${state}`).join('');
  $('ranks-text').textContent =
    `${all.num - all.odd.length} of ${all.num} ranks ${all.usual === 'unknown' ? 'in an unknown phase' : all.usual}${states}.`;
  $('odd').hidden = !all.odd.length;
  $('odd').tBodies[0].replaceChildren(
    ...all.odd
      .slice(0, 50)
      .map(o =>
        el(
          'tr',
          {},
          ...[o.rank, o.state, o.phase || 'unknown', o.step || 'unknown', o.text].map((v, i) =>
            el('td', { textContent: v, className: i % 3 ? '' : 'num' }),
          ),
        ),
      ),
  );
  $('grid-legend').replaceChildren(
    ...[
      ...(seen.length ? seen.map(([name, { length }]) => [`${name}: ${length}`, phaseColour(name)]) : [[all.usual, GRID[all.usual]]]),
      ...[...counts.keys()].map(name => [name, GRID[name]]),
    ].map(([words, colour]) => {
      const swatch = el('span', { className: 'swatch' });
      swatch.style.background = `var(${colour})`;
      return el('li', {}, swatch, words);
    }),
  );
  requestAnimationFrame(drawGrid);
}
function pick(i) {
  const all = ranks();
  picked = Math.max(0, Math.min(all.num - 1, i));
  const odd = all.odd.find(o => o.rank === picked);
  const phase = Object.keys(all.phases).find(name => all.phases[name].includes(picked));
  $('cell').textContent =
    `rank ${picked}, node ${Math.floor(picked / all.per_node)}: ${odd ? `${odd.state}${odd.phase ? ' in ' + odd.phase : ''}, ${odd.text}` : `${all.usual}${phase ? `, seen in ${phase}` : ''}`}`;
  drawGrid();
}
$('grid').addEventListener('keydown', e => {
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[e.key];
  if (by) {
    e.preventDefault();
    pick(picked + by);
  }
  if (e.key === 'Enter' && !embedded) {
    $('rank').value = picked;
    readLog();
    $('logs').scrollIntoView();
  }
});
$('grid').addEventListener('click', e => pick(Math.floor(e.offsetY / cell) * columns + Math.floor(e.offsetX / cell)));

// --- head, events, alerts
function drawHead() {
  const head = runs.get(shown[0]).head;
  document.title = `${head.name}: ${head.outcome}`;
  $('name').textContent = head.name;
  $('outcome').textContent = head.outcome;
  $('outcome').className = 'pill ' + head.outcome;
  $('sentence').textContent = head.sentence;
  for (const [id, label] of [
    ['reason', 'Why: '],
    ['resume', 'Resume it: '],
  ]) {
    $(id).hidden = !head[id];
    $(id).replaceChildren(
      el('strong', { textContent: label }),
      el(id === 'resume' ? 'code' : 'span', { textContent: head[id] }),
    );
  }
  $('tiles').replaceChildren(
    ...head.tiles.map(t =>
      el(
        'div',
        { className: 'tile' },
        el(
          'div',
          { className: 'name' },
          el('span', { textContent: t.name }),
          el('span', { className: 'how how-' + t.how, textContent: t.how }),
        ),
        el('div', { className: 'value', textContent: t.value }),
        el('div', { className: 'note', textContent: t.note }),
      ),
    ),
  );
  $('facts').replaceChildren(
    ...head.facts.flatMap(([name, value]) => [
      el('dt', { textContent: name }),
      el('dd', { textContent: value, className: /SHA|Folder/.test(name) ? 'mono' : '' }),
    ]),
  );
}
function drawEvents() {
  const { events, alerts = [] } = runs.get(shown[0]).happened,
    firing = alerts.filter(a => a.is_on);
  $('events').tBodies[0].replaceChildren(
    ...events
      .toReversed()
      .map(e =>
        el(
          'tr',
          { className: e.level },
          el('td', {
            className: 'num',
            textContent: new Date(e.at * 1000).toLocaleTimeString(),
            title: new Date(e.at * 1000).toISOString(),
          }),
          el('td', { textContent: e.name }),
          el(
            'td',
            { className: 'said' },
            e.text,
            ...(e.more
              ? [el('details', {}, el('summary', { textContent: 'more' }), el('pre', { textContent: e.more }))]
              : []),
          ),
        ),
      ),
  );
  $('alerting').hidden = !firing.length;
  $('alerts').replaceChildren(
    ...firing.map(a => el('li', { className: a.severity, textContent: a.text })),
  );
}
let frame = 0;
function draw() {
  if (!frame)
    frame = requestAnimationFrame(() => {
      frame = 0;
      if (!runs.has(shown[0])) return;
      drawHead();
      drawEvents();
      drawRanks();
      drawCharts();
      setTimeout(() => {
        window.begun ??= performance.now();
        if (shown.every(key => runs.has(key))) window.painted ??= performance.now();
      });
    });
}
for (const [id, kind] of [
  ['by-step', 'step'],
  ['by-time', 'time'],
])
  $(id).addEventListener('click', () => {
    axis = kind;
    zoom = null;
    runs.forEach(run => (run.zoomed = null));
    $('by-step').ariaPressed = kind === 'step';
    $('by-time').ariaPressed = kind === 'time';
    draw();
  });
addEventListener('resize', () => {
  drawGrid();
  charts.forEach(c => c.setSize({ width: Math.max(280, c.root.parentNode.clientWidth), height: 220 }));
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  drawGrid();
  charts.forEach(c => c.redraw());
});
const styled = root =>
  root.querySelectorAll('[data-style]').forEach(e =>
    e.dataset.style.split(';').forEach(pair => {
      const [name, value] = pair.split(':');
      e.style.setProperty(name.trim(), value.trim());
    }),
  );

// --- live: from the server that this page came from
let source = null;
async function ask(path) {
  const answer = await fetch('/api/' + path);
  if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
  return answer.json();
}
async function read(key) {
  runs.set(key, { ...(await ask('run/' + encodeURIComponent(key))), zoomed: null });
  draw();
}
async function show(keys) {
  shown = keys;
  zoom = null;
  source?.close();
  $('log').textContent = '';
  window.begun = window.painted = undefined;
  for (const old of [...runs.keys()]) if (!keys.includes(old)) runs.delete(old);
  try {
    for (const key of keys) {
      await read(key); // one after the other: the first is on the screen while the others are read
      if (shown !== keys) return;
    }
  } catch (problem) {
    $('link').textContent = problem.message;
    return;
  }
  listen();
  setTimeout(() => {
    readTables();
    readLog();
    differences();
  });
}
function listen() {
  source?.close();
  source = new EventSource(
    '/api/live?runs=' +
      shown.map(encodeURIComponent).join(',') +
      '&seen=' +
      JSON.stringify(shown.map(key => runs.get(key).seen)),
  );
  source.onopen = () => {
    $('link').textContent = 'live';
  };
  source.onerror = () => {
    $('link').textContent = 'connection lost, trying again';
  };
  source.addEventListener('news', e => {
    const news = JSON.parse(e.data);
    if (runs.has(news.key)) took(news);
  });
}
function took({ key, head, happened, rows }) {
  const run = runs.get(key),
    ended = run.head.outcome !== head.outcome;
  run.head = head;
  if (happened) {
    run.happened = happened;
    run.tables = [run.tables[0], ...happened.tables];
  }
  if (rows && !grow(run.tables[0], rows)) {
    read(key);
    return;
  }
  draw();
  if (ended) readTables();
  if (rows?.at.length)
    requestAnimationFrame(() =>
      setTimeout(() => {
        window.lag.push(Date.now() / 1000 - rows.at.at(-1));
      }),
    );
}
/** Append rows; steps that are repeated replace theirs. False where the picture must be read anew. */
function grow(table, rows) {
  const names = Object.keys(rows.curves);
  if (!table || table.step.length > MOST_POINTS || names.some(name => !(name in table.curves))) return false;
  let keep = table.step.length;
  while (keep && table.step[keep - 1] >= rows.step[0]) keep--;
  const put = (old, fresh) => {
    old.length = keep;
    old.push(...fresh);
  };
  put(table.step, rows.step);
  put(table.at, rows.at);
  for (const name of names) {
    const curve = table.curves[name],
      fresh = rows.curves[name];
    for (const part of Object.keys(curve)) put(curve[part], fresh[part] ?? fresh.mean);
  }
  return true;
}
async function readTables() {
  const key = shown[0],
    answer = await fetch(`/api/run/${encodeURIComponent(key)}/tables`);
  if (!answer.ok || key !== shown[0]) return;
  const parsed = new DOMParser().parseFromString(await answer.text(), 'text/html'); // nothing in it runs: made by our template, which escapes, and under this page's policy
  styled(parsed.body);
  $('tables').replaceChildren(...parsed.body.childNodes);
}
async function readLog() {
  const find = $('find-log').value,
    key = shown[0];
  let lines;
  try {
    lines = (await ask(`run/${encodeURIComponent(key)}/log/${$('rank').value | 0}`)).lines ?? [
      'no log of this rank here',
    ];
  } catch {
    return;
  }
  const text = lines.filter(line => line.includes(find)).join('\n');
  if (key !== shown[0] || text === $('log').textContent) return;
  $('log').textContent = text;
  if ($('follow').checked) $('log').scrollTop = $('log').scrollHeight;
}
async function differences() {
  $('comparing').hidden = shown.length < 2;
  if (shown.length < 2) return;
  const { runs: names, differ, same } = await ask('compare?runs=' + shown.map(encodeURIComponent).join(','));
  $('same').textContent = `${same} settings are the same in all of them.`;
  $('differ').tHead.replaceChildren(
    el('tr', {}, el('th', { textContent: 'Setting' }), ...names.map(name => el('th', { textContent: name }))),
  );
  $('differ').tBodies[0].replaceChildren(
    ...Object.entries(differ).map(([field, values]) =>
      el(
        'tr',
        {},
        el('td', { className: 'mono', textContent: field }),
        ...values.map(v => el('td', { textContent: v == null ? '-' : typeof v === 'string' ? v : JSON.stringify(v) })),
      ),
    ),
  );
}
async function list() {
  const rows = await ask('runs'),
    find = $('find').value.toLowerCase();
  $('runs').replaceChildren(
    ...rows
      .filter(row => row.key.toLowerCase().includes(find))
      .slice(0, 200)
      .map(row => {
        const box = el('input', { type: 'checkbox', checked: shown.includes(row.key), ariaLabel: 'show ' + row.key });
        box.addEventListener('change', () =>
          go(box.checked ? [...shown, row.key] : shown.filter(key => key !== row.key)),
        );
        return el(
          'li',
          {},
          box,
          el('a', { href: '#' + encodeURIComponent(row.key), textContent: row.key }),
          el('small', { className: row.state, textContent: row.state }),
        );
      }),
  );
  return rows;
}
const go = keys => {
  if (keys.length) location.hash = keys.map(encodeURIComponent).join(',');
};
const named = () => location.hash.slice(1).split(',').filter(Boolean).map(decodeURIComponent);
async function live() {
  if (location.search.includes('token=')) history.replaceState(null, '', location.pathname + location.hash); // not into bookmarks
  const given = named(),
    listed = list();
  if (given.length) show(given);
  else {
    const rows = await listed;
    if (rows.length) show([(rows.find(row => row.state !== 'damaged') ?? rows[0]).key]);
    else $('sentence').textContent = 'There is no run here yet.';
  }
  addEventListener('hashchange', () => {
    show(named());
    list();
  });
  document.addEventListener('visibilitychange', () => {
    if (document.hidden) {
      source?.close();
      $('link').textContent = 'paused';
    } else show(shown);
  }); // a browser has six streams a host
  $('find').addEventListener('input', list);
  $('rank').addEventListener('change', readLog);
  $('find-log').addEventListener('input', readLog);
  setInterval(() => {
    if (!document.hidden) {
      list().catch(() => {});
    }
  }, 5000);
  setInterval(() => {
    if (!document.hidden && $('follow').checked && shown.length) readLog();
  }, 2000);
}
if (embedded) {
  runs.set('frozen', { ...JSON.parse(embedded.textContent), zoomed: null });
  shown = ['frozen'];
  styled(document);
  draw();
} else live();
