import { spawnSync } from 'node:child_process'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { after } from 'node:test'
import { fileURLToPath } from 'node:url'

export const packageFolder = fileURLToPath(new URL('..', import.meta.url))
export const repository = fileURLToPath(new URL('../../..', import.meta.url))
export const python = process.env.TRAINWIRE_PYTHON ?? 'python3'
/** The real worker with the scripted engine: no MLX, no model. */
export const worker = [python, '-m', 'trainwire_worker']

const probe = spawnSync(python, ['-c', 'import trainwire_worker, trainwire_fake'], { encoding: 'utf8' })
/** Why tests of the real worker are left out; false where they run. */
export const withoutWorker =
  probe.status === 0 ? false : `${python} has no trainwire: set TRAINWIRE_PYTHON to an interpreter that has`

const folders = []
// At the very end: hooks run in the order in which they were made, and a run must be over before its folder goes.
after(() => {
  for (const made of folders) fs.rmSync(made, { recursive: true, force: true, maxRetries: 5, retryDelay: 100 })
})

/** Makes a folder that is gone when the file's tests are over. */
export function folder() {
  const made = fs.realpathSync(fs.mkdtempSync(path.join(os.tmpdir(), 'trainwire-test-')))
  folders.push(made)
  return made
}

export async function collect(run, until = () => false) {
  const events = []
  for await (const event of run) {
    events.push(event)
    if (until(event)) break
  }
  return events
}

export const types = (events) => events.map((event) => event.type)

/** Says whether a process runs. One that is over but not yet collected by its parent does not. */
export function exists(pid) {
  try {
    process.kill(pid, 0)
  } catch {
    return false
  }
  try {
    return !/\) Z /.test(fs.readFileSync(`/proc/${pid}/stat`, 'utf8'))
  } catch {
    return true
  }
}

/** Waits until something holds, and says what did not if it never does. */
export async function until(what, holds, ms = 90_000) {
  const deadline = Date.now() + ms
  while (!(await holds())) {
    if (Date.now() > deadline) throw new Error(`${what} did not happen within ${ms} ms`)
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}
