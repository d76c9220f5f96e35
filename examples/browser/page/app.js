// The page: a picture from the snapshot, then event by event.

import uPlot from '/uplot.js'

const $ = (id) => document.getElementById(id)
const MAX_POINTS = 3000
const SMOOTHING = 0.9

let lastSeq = 0
let phase = 'connecting'
let paused = false
/** Columns of the chart: step, loss, smoothed loss, validation loss. */
let columns = [[], [], [], []]
/** A running mean that forgets, and the share of it that is no longer its start. */
let mean = { sum: 0, weight: 0 }
let chart = null
let drawing = false

// Numbers as people read them

const number = (value, digits = 3) => (value == null ? '–' : value.toFixed(digits))
const rate = (value) => (value == null ? '–' : value === 0 ? '0' : value.toExponential(2).replace('e', ' e'))
function size(bytes) {
  const power = bytes >= 2 ** 30 ? 3 : bytes >= 2 ** 20 ? 2 : 1
  const value = bytes / 1024 ** power
  return `${value.toFixed(value < 10 ? 1 : 0)} ${['', 'KiB', 'MiB', 'GiB'][power]}`
}
function duration(ms) {
  const s = Math.round(ms / 1000)
  if (s < 60) return `${s} s`
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`
}

// The curve

function addPoint(step, loss, valid = null) {
  const [x, raw, soft, checks] = columns
  if (x.length > 0 && step <= x.at(-1)) {
    const at = x.findLastIndex((known) => known <= step)
    if (at !== -1 && valid !== null) checks[at] = valid
    return
  }
  if (loss != null) {
    mean.sum = SMOOTHING * mean.sum + (1 - SMOOTHING) * loss
    mean.weight = SMOOTHING * mean.weight + (1 - SMOOTHING)
  }
  x.push(step)
  raw.push(loss)
  soft.push(mean.weight ? mean.sum / mean.weight : null)
  checks.push(valid)
  if (x.length > MAX_POINTS) thin()
}

/** Puts neighbours together: half as many points, the same curve. */
function thin() {
  const [x] = columns
  const middle = (a, b) => (a == null ? b : b == null ? a : (a + b) / 2)
  columns = columns.map((column, which) => {
    const kept = []
    for (let i = 0; i < x.length; i += 2) {
      const a = column[i]
      const b = i + 1 < x.length ? column[i + 1] : a
      kept.push(which === 0 ? b : middle(a, b))
    }
    return kept
  })
}

function loadSeries(series) {
  columns = [[], [], [], []]
  mean = { sum: 0, weight: 0 }
  if (!series) return
  series.loss.steps.forEach((step, i) => addPoint(step, series.loss.values[i]))
  const [x, , , checks] = columns
  series.valid_loss.steps.forEach((step, i) => {
    const at = x.findIndex((known) => known >= step)
    if (at !== -1) checks[at] = series.valid_loss.values[i]
  })
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()

function makeChart() {
  chart?.destroy()
  const box = $('chart')
  const line = { stroke: color('--line'), width: 1 }
  const axis = { stroke: color('--soft'), grid: line, ticks: line }
  const curve = (label, name, more) => ({
    label,
    stroke: color(name),
    width: 2,
    points: { show: false },
    value: (_, value) => number(value),
    ...more,
  })
  chart = new uPlot(
    {
      width: box.clientWidth,
      height: box.clientWidth < 600 ? 240 : 340,
      scales: { x: { time: false } },
      axes: [axis, { ...axis, size: 52 }],
      series: [
        { label: 'step' },
        curve('loss', '--raw', { width: 1 }),
        curve('smoothed', '--accent'),
        curve('validation', '--valid', { spanGaps: true, points: { show: true, size: 7, fill: color('--valid') } }),
      ],
    },
    columns,
    box,
  )
}

function draw() {
  if (drawing) return
  drawing = true
  requestAnimationFrame(() => {
    drawing = false
    chart.setData(columns)
  })
}

new ResizeObserver(([{ contentRect }]) => {
  if (chart && Math.abs(chart.width - contentRect.width) > 1) {
    chart.setSize({ width: contentRect.width, height: contentRect.width < 600 ? 240 : 340 })
  }
}).observe($('chart'))
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', makeChart)

// What the page shows

const KINDS = {
  ...{ running: 'good', completed: 'good' },
  ...{ paused: 'wait', pausing: 'wait', stopping: 'wait' },
  ...{ failed: 'bad', gone: 'bad' },
}
const LIVE = ['running', 'paused', 'pausing']

function showPhase(name) {
  phase = name
  paused = name === 'paused' || name === 'pausing'
  $('phase').textContent = name
  $('phase').dataset.kind = KINDS[name] ?? ''
  $('pause').textContent = paused ? 'Resume' : 'Pause'
  const live = LIVE.includes(name)
  $('pause').disabled = !live
  $('checkpoint').disabled = !live
  $('stop').disabled = !live && !['loading', 'preparing', 'lingering'].includes(name)
  for (const field of document.querySelectorAll('.setting :is(input, select, button)')) field.disabled = !live
}

function showStep(step) {
  if (!step) return
  $('bar').max = Math.max(1, step.total_steps)
  $('bar').value = step.step
  $('steps').textContent = `step ${step.step} of ${step.total_steps} · epoch ${step.epoch}`
  $('eta').textContent = step.eta_ms ? `${duration(step.eta_ms)} left` : ''
  $('loss').textContent = number(step.loss)
  $('rate').textContent = rate(step.learning_rate)
  $('speed').textContent = Math.round(step.tokens_per_second).toLocaleString('en')
  $('memory').textContent = size(step.peak_bytes)
}

function describe(event) {
  switch (event.type) {
    case 'log':
      return [event.level, event.message]
    case 'checkpoint':
      return ['', `step ${event.step}: saved ${event.path.split('/').pop()} (${size(event.bytes)})`]
    case 'eval_end':
      return ['', `step ${event.step}: validation loss ${number(event.valid_loss)}${event.best ? ', the best' : ''}`]
    case 'error':
      return ['error', `${event.message} ${event.hint ?? ''}`]
    default:
      return ['', `${event.outcome}: ${event.reason}`]
  }
}

function addNotice(event) {
  const [kind, text] = describe(event)
  const item = document.createElement('li')
  item.className = kind
  item.textContent = text
  $('notices').prepend(item)
  while ($('notices').children.length > 50) $('notices').lastChild.remove()
}

function showSnapshot(shot) {
  lastSeq = shot.lastSeq
  document.title = $('name').textContent = shot.name || 'trainwire'
  loadSeries(shot.series)
  $('notices').replaceChildren()
  shot.notices.forEach(addNotice)
  showStep(shot.last)
  const evaluations = shot.series?.valid_loss.values ?? []
  $('valid').textContent = number(evaluations.at(-1))
  for (const [key, value] of Object.entries(shot.settings)) showSetting(key, value)
  showPhase(shot.error ? 'gone' : (shot.result?.outcome ?? shot.phase))
  if (shot.error) say(shot.error, true)
  makeChart()
}

function showEvent(event) {
  if (event.seq !== undefined && event.seq <= lastSeq) return
  lastSeq = event.seq ?? lastSeq
  switch (event.type) {
    case 'init':
      document.title = $('name').textContent = event.run_name
      for (const [key, value] of Object.entries(event.config)) showSetting(key, value)
      break
    case 'step':
      addPoint(event.step, event.loss)
      showStep(event)
      draw()
      break
    case 'eval_end':
      addPoint(event.step, null, event.valid_loss)
      $('valid').textContent = number(event.valid_loss)
      draw()
      break
    case 'status':
      showPhase(event.phase)
      break
    case 'config_changed':
      for (const [key, { to }] of Object.entries(event.changes)) showSetting(key, to)
      break
    case 'attempt':
      // Steps of the attempt before may be void: the log knows which.
      if (event.attempt > 1) connect()
      break
  }
  if (['log', 'checkpoint', 'eval_end', 'error', 'end'].includes(event.type)) addNotice(event)
}

// Orders

function say(text, bad = false) {
  $('said').textContent = text
  $('said').classList.toggle('bad', bad)
}

async function order(cmd, parameters = {}) {
  const response = await fetch('/command', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ cmd, ...parameters }),
  }).catch(() => null)
  const answer = await response?.json().catch(() => null)
  if (!response?.ok) {
    say(answer?.message ?? 'The server does not answer.', true)
    return null
  }
  return answer
}

$('pause').addEventListener('click', () => order(paused ? 'resume' : 'pause'))
$('checkpoint').addEventListener('click', () => order('checkpoint'))
$('stop').addEventListener('click', () => confirm('Stop the run? It saves a checkpoint first.') && order('stop'))

// Settings, from the schema

const title = (key) => key.replaceAll('_', ' ')

function makeSetting(key, { description, type, enum: choices, minimum, exclusiveMinimum }) {
  const row = document.createElement('div')
  row.className = 'setting'
  const label = Object.assign(document.createElement('label'), { textContent: title(key), htmlFor: `set-${key}` })
  const field = document.createElement(choices ? 'select' : 'input')
  field.id = field.name = `set-${key}`
  if (choices) field.append(...choices.map((choice) => new Option(choice.replaceAll('_', ' '), choice)))
  else {
    const step = type === 'integer' ? '1' : 'any'
    Object.assign(field, { type: 'number', step, required: true, inputMode: 'decimal' })
    if (minimum !== undefined) field.min = minimum
    if (exclusiveMinimum !== undefined) field.min = Number.MIN_VALUE
  }
  const button = Object.assign(document.createElement('button'), { type: 'button', textContent: 'Apply' })
  const apply = async () => {
    if (!field.reportValidity()) return
    const value = choices ? field.value : Number(field.value)
    const answer = await order('set', { values: { [key]: value } })
    if (answer) say(`${title(key)} is ${answer.applied[key]} from step ${answer.effective_step} on.`)
  }
  button.addEventListener('click', apply)
  field.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter') return
    event.preventDefault()
    apply()
  })
  row.append(label, field, button, Object.assign(document.createElement('small'), { textContent: description }))
  return row
}

function showSetting(key, value) {
  const field = $(`set-${key}`)
  if (field && field !== document.activeElement && value != null) field.value = value
}

async function makeSettings() {
  const { properties } = await (await fetch('/settings')).json()
  const { learning_rate: first, ...others } = properties
  $('settings').append(makeSetting('learning_rate', first))
  $('more').append(...Object.entries(others).map(([key, property]) => makeSetting(key, property)))
}

// The stream: EventSource connects again by itself, and each connection begins with a snapshot.

let source = null

function connect() {
  source?.close()
  source = new EventSource('/events')
  source.addEventListener('snapshot', ({ data }) => showSnapshot(JSON.parse(data)))
  source.addEventListener('run', ({ data }) => showEvent(JSON.parse(data)))
  source.addEventListener('over', () => source.close())
  source.addEventListener('error', () => {
    if (source.readyState !== EventSource.CLOSED) showPhase('reconnecting')
  })
}

await makeSettings()
connect()
