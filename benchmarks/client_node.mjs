// Measures the Node client: events parsed and delivered on one core, launch to first event, memory over many events.
//
//   node benchmarks/client_node.mjs [--events N] [--launches N] [--python PATH]
//
// Live memory is what is left after a garbage collection. A producer prints step lines as fast as they are read; CPU
// time is this process's alone. With --python the launch is measured with the real worker and the scripted engine, else
// with the fake worker.

import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { parseArgs } from 'node:util'
import { setFlagsFromString } from 'node:v8'
import { runInNewContext } from 'node:vm'

import { launch } from '../clients/node/index.mjs'
import { fakeWorker, sample } from '../clients/node/testing/index.mjs'

const { values } = parseArgs({
  options: {
    events: { type: 'string', default: '1000000' },
    launches: { type: 'string', default: '20' },
    python: { type: 'string' },
  },
})
const events = Number(values.events)
setFlagsFromString('--expose-gc')
const collectGarbage = runInNewContext('gc')
const folder = mkdtempSync(path.join(tmpdir(), 'trainwire-bench-'))
process.on('exit', () => rmSync(folder, { recursive: true, force: true }))

/** Writes a program that speaks like a worker and prints `count` step lines. */
function producer(count) {
  const file = path.join(folder, 'producer.js')
  const line = (message) => `${JSON.stringify(message)}\n`
  const { type, ...step } = sample('step', { seq: 0 })
  delete step.seq
  writeFileSync(
    file,
    `
const fs = require('fs')
fs.writeSync(1, ${JSON.stringify(line(sample('hello')))})
fs.readSync(0, Buffer.alloc(65536))
const rest = ${JSON.stringify(JSON.stringify(step).slice(1))}
let block = ''
for (let seq = 1; seq <= ${count}; seq++) {
  block += '{"type":"step","seq":' + seq + ',' + rest + '\\n'
  if (block.length > 60000 || seq === ${count}) {
    let bytes = Buffer.from(block)
    while (bytes.length) bytes = bytes.subarray(fs.writeSync(1, bytes))
    block = ''
  }
}
fs.writeSync(1, ${JSON.stringify(line(sample('end', { seq: count + 1 })))})
`,
  )
  return [process.execPath, file]
}

const megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1)

async function deliver(how) {
  const run = await launch({ model: 'm', data: 'd' }, { command: producer(events) })
  const memory = []
  let updates = 0
  let delivered = 0
  let resident = 0
  const count = (event) => {
    if (event.type !== 'step') return
    updates += event.updates
    delivered += 1
    if (delivered % Math.ceil(events / 10) !== 0) return
    collectGarbage()
    const { heapUsed, external, rss } = process.memoryUsage()
    memory.push(heapUsed + external)
    resident = Math.max(resident, rss)
  }
  const cpu = process.cpuUsage()
  const began = performance.now()
  if (how === 'loop') for await (const event of run) count(event)
  else {
    run.on('step', count)
    await run.wait()
  }
  const seconds = (performance.now() - began) / 1000
  const { user, system } = process.cpuUsage(cpu)
  if (updates !== events) throw new Error(`${updates} updates instead of ${events}`)
  const perSecond = Math.round(delivered / ((user + system) / 1e6))
  console.log(
    `${how}: ${delivered} events in ${seconds.toFixed(2)} s, ${perSecond} events per second of CPU; ` +
      `live memory at each tenth ${memory.map(megabytes).join(' ')} MiB, resident at most ${megabytes(resident)} MiB`,
  )
}

async function firstEvents() {
  const command = values.python
    ? [values.python, '-m', 'trainwire_worker']
    : fakeWorker({ worker: [{ hello: {} }, { start: {} }, { await: 'stop' }, { finish: { outcome: 'stopped' } }] })
  const workerArgs = values.python ? ['--engine', 'fake'] : []
  const times = []
  for (let i = 0; i < Number(values.launches); i++) {
    const began = performance.now()
    const config = { model: 'm', data: 'd.jsonl', run_dir: path.join(folder, `run-${i}`), max_steps: 100_000 }
    const run = await launch(config, { command, workerArgs })
    for await (const _ of run) break
    times.push(performance.now() - began)
    await run.kill()
  }
  times.sort((a, b) => a - b)
  const at = (share) => times[Math.min(times.length - 1, Math.floor(share * times.length))].toFixed(0)
  const name = values.python ? 'the worker' : 'the fake worker'
  console.log(`launch to first event with ${name}: median ${at(0.5)} ms, 90 % ${at(0.9)} ms, slowest ${at(1)} ms`)
}

await deliver('loop')
await deliver('listener')
await firstEvents()
