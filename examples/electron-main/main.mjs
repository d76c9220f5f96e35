// An Electron main process that trains in the background and tells its window over IPC:
//
//   npx electron examples/electron-main/main.mjs CONFIG.toml --command=/path/to/trainwire
//
// Events are sent in batches, twenty times a second at most: a renderer that paints every update of a fast run would
// be busy with nothing else. The window may be closed and opened again; quitting stops the run with a checkpoint.

import { fileURLToPath } from 'node:url'

import { app, BrowserWindow, ipcMain } from 'electron'
import { CommandFailed, launch } from 'trainwire'

const here = (name) => fileURLToPath(new URL(name, import.meta.url))
const BATCH_MS = 50
/** What a window may ask for; everything else is refused. */
const ORDERS = {
  pause: (run) => run.pause(),
  resume: (run, options) => run.resume(options),
  checkpoint: (run) => run.checkpoint(),
  stop: (run) => run.stop(),
  set: (run, values) => run.set(values),
  status: (run) => run.status(),
}

/** Collects events and sends them together. */
class Batches {
  #send
  #waiting = []
  #timer

  constructor(send) {
    this.#send = send
  }

  add(event) {
    this.#waiting.push(event)
    this.#timer ??= setTimeout(() => this.flush(), BATCH_MS)
  }

  flush() {
    clearTimeout(this.#timer)
    this.#timer = undefined
    if (this.#waiting.length > 0) this.#send(this.#waiting.splice(0))
  }
}

let window
let run

function openWindow() {
  const webPreferences = { preload: here('preload.cjs'), sandbox: true }
  window = new BrowserWindow({ width: 900, height: 640, webPreferences })
  window.on('closed', () => (window = undefined))
  window.loadFile(here('index.html'))
}

function tell(channel, message) {
  if (window && !window.isDestroyed()) window.webContents.send(channel, message)
}

/** Follows the run to its end, and tells the window how it ended. */
async function follow() {
  const batches = new Batches((events) => tell('trainwire:events', events))
  try {
    for await (const event of run) batches.add(event)
    batches.flush()
    tell('trainwire:over', { result: { ...(await run.wait()) } })
  } catch (error) {
    batches.flush()
    // An Error does not survive the way to the window; its sentence does.
    tell('trainwire:over', { error: error.message })
  }
}

ipcMain.handle('trainwire:order', async (_, name, parameters) => {
  if (!Object.hasOwn(ORDERS, name)) return { error: `There is no order ${name}.` }
  try {
    return { answer: await ORDERS[name](run, parameters ?? {}) }
  } catch (error) {
    return { error: error.message, code: error instanceof CommandFailed ? error.code : undefined }
  }
})

app.on('activate', () => window ?? openWindow())
app.on('window-all-closed', () => {
  if (process.platform !== 'darwin') app.quit()
})
app.on('before-quit', (event) => {
  if (!run || run.ended) return
  event.preventDefault()
  run.close().finally(() => app.quit())
})

const option = (name) => process.argv.find((word) => word.startsWith(`--${name}=`))?.slice(name.length + 3)
const config = process.argv.find((word) => /\.(toml|json)$/.test(word))

await app.whenReady()
openWindow()
try {
  run = await launch(config, {
    command: option('command')?.split(' '),
    workerArgs: option('worker-args')?.split(' ') ?? [],
    supervise: true,
  })
  follow()
} catch (error) {
  tell('trainwire:over', { error: error.message })
}
