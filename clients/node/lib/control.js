'use strict'

const fs = require('node:fs/promises')
const net = require('node:net')
const os = require('node:os')
const path = require('node:path')

const { Channel, PROTOCOL } = require('./channel.js')
const { NoWorker, ProtocolMismatch } = require('./errors.js')

const LOCK_NAME = 'run.lock'
/** How long a socket without open commands is kept: another controller may want to steer. */
const LINGER = 200

/** Reads what the holder of a run's lock wrote about itself; undefined where nobody ever did. */
async function readLock(runDir) {
  try {
    const lock = JSON.parse(await fs.readFile(path.join(runDir, LOCK_NAME), 'utf8'))
    return Number.isInteger(lock?.pid) ? lock : undefined
  } catch {
    return undefined
  }
}

function processExists(pid) {
  try {
    process.kill(pid, 0)
    return true
  } catch (error) {
    return error.code === 'EPERM'
  }
}

function connect(socketPath) {
  return new Promise((resolve, reject) => {
    const socket = net.connect(socketPath)
    socket.once('connect', () => resolve(socket)).once('error', reject)
  })
}

/**
 * Says whether a worker holds the run. A file says who it was; that it lives is proved by its control socket, which
 * refuses once its process is gone, since a process number may have been given to another. Of a worker on another
 * host neither can be asked: it is believed to live as long as the file says so, which one that ends takes back.
 */
async function workerLives(runDir) {
  const lock = await readLock(runDir)
  if (lock === undefined) return false
  if (lock.host !== undefined && lock.host !== os.hostname()) return true
  if (!processExists(lock.pid)) return false
  if (!lock.socket) return true
  try {
    const socket = await connect(lock.socket)
    socket.destroy()
    return true
  } catch (error) {
    return error.code === 'EAGAIN'
  }
}

/** Steers a run that another process started, through its control socket, which is opened when it is needed. */
class Control {
  #runDir
  #opening
  #channel
  #socket
  #timer

  constructor(runDir) {
    this.#runDir = runDir
  }

  async request(cmd, parameters, call) {
    this.#opening ??= this.#open()
    const channel = await this.#opening
    clearTimeout(this.#timer)
    try {
      return await channel.request(cmd, parameters, call)
    } finally {
      if (channel === this.#channel && channel.openCommands === 0) {
        this.#timer = setTimeout(() => this.close(), LINGER)
        this.#timer.unref()
      }
    }
  }

  async #open() {
    try {
      const lock = await readLock(this.#runDir)
      if (!lock?.socket) throw new NoWorker(`No worker of ${this.#runDir} listens for commands.`)
      const socket = await connect(lock.socket).catch((error) => {
        throw new NoWorker(`No worker of ${this.#runDir} listens on ${lock.socket} any more: ${error.message}`)
      })
      return await this.#greet(socket)
    } catch (error) {
      this.#opening = undefined
      throw error
    }
  }

  #greet(socket) {
    return new Promise((resolve, reject) => {
      const refused = () => new NoWorker(`Another controller steers the run in ${this.#runDir}.`)
      const channel = new Channel({
        write: (text) => socket.write(text),
        // The events come from the log.
        onMessage: (message) => {
          if (message.type !== 'hello') return
          if (message.protocol === PROTOCOL) resolve(channel)
          else {
            socket.destroy()
            reject(new ProtocolMismatch(message.worker?.name, message.protocol, PROTOCOL))
          }
        },
        onJunk: () => {},
      })
      socket.on('data', (chunk) => channel.feed(chunk))
      socket.on('error', () => {})
      socket.on('close', () => {
        if (this.#channel === channel) this.#forget()
        reject(refused())
        channel.failAll((cmd) => new NoWorker(`${cmd} was not answered: the worker closed its control socket.`))
      })
      this.#socket = socket
      this.#channel = channel
    })
  }

  #forget() {
    clearTimeout(this.#timer)
    this.#opening = undefined
    this.#channel = undefined
    this.#socket = undefined
  }

  close() {
    const socket = this.#socket
    this.#forget()
    socket?.destroy()
  }
}

module.exports = { Control, readLock, workerLives }
