// Streams a run to a browser page, which pauses, stops and changes it:
//
//   node examples/browser/server.mjs CONFIG.toml --command /path/to/trainwire [--port 8765]
//   node examples/browser/server.mjs RUN_DIR                follows a run that somebody else started
//
// Every page has a loop of its own over the run's events, so that a slow one lags alone: the client puts step events
// together for it. A page that is loaded again gets the whole curve from the run's log.

import { once } from 'node:events'
import { readFile, stat } from 'node:fs/promises'
import http from 'node:http'
import { createRequire } from 'node:module'
import path from 'node:path'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { parseArgs } from 'node:util'

import { attach, CommandFailed, history, launch } from 'trainwire'

const require = createRequire(import.meta.url)
const schema = require('trainwire/schema.json')
const page = (name) => fileURLToPath(new URL(`page/${name}`, import.meta.url))
const chart = path.dirname(require.resolve('uplot'))

const FILES = {
  '/': ['text/html', page('index.html')],
  '/app.js': ['text/javascript', page('app.js')],
  '/style.css': ['text/css', page('style.css')],
  '/uplot.js': ['text/javascript', path.join(chart, 'uPlot.esm.js')],
  '/uplot.css': ['text/css', path.join(chart, 'uPlot.min.css')],
}
/** What a page may ask for, with the call that does it. */
const ORDERS = {
  pause: (run) => run.pause(),
  resume: (run, { steps }) => run.resume({ steps }),
  checkpoint: (run) => run.checkpoint(),
  stop: (run) => run.stop(),
  set: (run, { values }) => run.set(values),
}
const POINTS = 1000
const NOTICES = 50

/** What a page that has just been loaded must know, kept up to date from the run's events. */
class Picture {
  name = ''
  totalSteps = 0
  settings = {}
  last = null
  notices = []
  result = null
  error = null

  async follow(run) {
    try {
      for await (const event of run) this.see(event)
      this.result = run.result
    } catch (error) {
      this.error = error.message
    }
  }

  see(event) {
    if (event.type === 'init') {
      this.name = event.run_name
      this.totalSteps = event.total_steps
      for (const key of Object.keys(schema.$defs.SettableValues.properties)) this.settings[key] = event.config[key]
    } else if (event.type === 'config_changed') {
      for (const [key, { to }] of Object.entries(event.changes)) this.settings[key] = to
    } else if (event.type === 'step') {
      this.last = event
      this.totalSteps = event.total_steps
    } else if (['log', 'checkpoint', 'eval_end', 'error', 'end'].includes(event.type)) {
      this.notices = [...this.notices, event].slice(-NOTICES)
    }
  }
}

async function snapshot(run, picture) {
  // Read first: what comes while the log is being read is in the log, and the page drops what it knows.
  const { phase, lastSeq } = run
  const series = run.runDir
    ? await history(run.runDir, { metrics: ['loss', 'valid_loss'], maxPoints: POINTS }).catch(() => null)
    : null
  const { name, totalSteps, settings, last, notices, result, error } = picture
  return { name, runDir: run.runDir, phase, lastSeq, totalSteps, settings, last, notices, result, error, series }
}

/** Resolves when the page has read what was sent, or has gone away. */
function drained(response) {
  return new Promise((resolve) => {
    const done = () => {
      response.off('drain', done).off('close', done)
      resolve()
    }
    if (response.destroyed) resolve()
    else response.on('drain', done).on('close', done)
  })
}

/** Sends a snapshot and then every event, as server-sent events, until the page goes away. */
async function stream(run, picture, response) {
  response.writeHead(200, { 'content-type': 'text/event-stream', 'cache-control': 'no-store' })
  const events = run[Symbol.asyncIterator]()
  response.on('close', () => events.return())
  const send = async (name, data) => {
    const room = response.write(`event: ${name}\ndata: ${JSON.stringify(data)}\n\n`)
    if (!room) await drained(response)
  }
  await send('snapshot', await snapshot(run, picture))
  try {
    for await (const event of events) await send('run', event)
  } catch {
    // The picture says why the run is gone.
  }
  if (response.writable) {
    await send('snapshot', await snapshot(run, picture))
    await send('over', {})
    response.end()
  }
}

/** Refuses what another site's page, or a name that was pointed at this machine, could send. */
function isOurs(request, port) {
  const hosts = [`127.0.0.1:${port}`, `localhost:${port}`]
  const { host, origin } = request.headers
  return hosts.includes(host) && (origin === undefined || hosts.includes(origin.replace('http://', '')))
}

async function command(run, request, response) {
  const answer = (status, body) => {
    response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify(body))
  }
  if (!request.headers['content-type']?.startsWith('application/json')) return answer(415, { message: 'JSON, please.' })
  let text = ''
  for await (const chunk of request.setEncoding('utf8')) {
    text += chunk
    if (text.length > 10_000) return answer(413, { message: 'That is too long.' })
  }
  try {
    const { cmd, ...parameters } = JSON.parse(text)
    if (!Object.hasOwn(ORDERS, cmd)) return answer(404, { message: `There is no command ${cmd} here.` })
    return answer(200, await ORDERS[cmd](run, parameters))
  } catch (error) {
    const status = error instanceof CommandFailed ? 409 : error instanceof SyntaxError ? 400 : 503
    return answer(status, { message: error.message, code: error.code })
  }
}

/** Serves a run on this machine's loopback address; resolves with the server once it listens. */
export async function serve(run, { port = 0 } = {}) {
  const picture = new Picture()
  picture.follow(run)
  const server = http.createServer(async (request, response) => {
    const { pathname } = new URL(request.url, 'http://localhost')
    if (!isOurs(request, server.address().port)) response.writeHead(403).end()
    else if (request.method === 'POST' && pathname === '/command') await command(run, request, response)
    else if (request.method !== 'GET') response.writeHead(405).end()
    else if (pathname === '/events') await stream(run, picture, response)
    else if (pathname === '/settings') {
      response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(schema.$defs.SettableValues))
    } else if (Object.hasOwn(FILES, pathname)) {
      const [type, file] = FILES[pathname]
      response.writeHead(200, { 'content-type': type }).end(await readFile(file))
    } else response.writeHead(404).end()
  })
  server.listen(port, '127.0.0.1')
  await once(server, 'listening')
  return server
}

async function main() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      command: { type: 'string', multiple: true },
      'worker-arg': { type: 'string', multiple: true, default: [] },
      port: { type: 'string', default: '8765' },
    },
  })
  const [target] = positionals
  if (!target) throw new Error('Give a config file with --command, or the folder of a run.')
  const follows = (await stat(target)).isDirectory()
  const run = follows
    ? await attach(target)
    : await launch(target, { command: values.command, workerArgs: values['worker-arg'], supervise: true })
  const server = await serve(run, { port: Number(values.port) })
  console.log(`http://127.0.0.1:${server.address().port}/`)
  const leave = async () => {
    console.log(follows ? 'The run goes on.' : 'Stopping the run, with a checkpoint …')
    await run.close()
    process.exit(0)
  }
  process.once('SIGINT', leave).once('SIGTERM', leave)
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  main().catch((error) => {
    console.error(error.message)
    process.exitCode = 1
  })
}
