// Stands in for Electron in the example's test: lines of JSON on stdin are what a window asks for, lines on stdout are
// what it is told.

import { EventEmitter } from 'node:events'
import readline from 'node:readline'

const say = (message) => process.stdout.write(`${JSON.stringify(message)}\n`)
const handlers = new Map()

export const ipcMain = { handle: (channel, handler) => handlers.set(channel, handler) }

class App extends EventEmitter {
  whenReady() {
    return Promise.resolve()
  }

  quit() {
    let stays = false
    this.emit('before-quit', { preventDefault: () => (stays = true) })
    if (!stays) process.exit(0)
  }
}

export const app = new App()

export class BrowserWindow extends EventEmitter {
  webContents = { send: (channel, message) => say({ channel, message: structuredClone(message) }) }

  isDestroyed() {
    return false
  }

  loadFile(file) {
    say({ loaded: file })
  }
}

readline.createInterface({ input: process.stdin }).on('line', async (line) => {
  const { channel, args, quit } = JSON.parse(line)
  if (quit) app.quit()
  else say({ answer: await handlers.get(channel)({}, ...args) })
})
