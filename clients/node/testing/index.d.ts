import type { Message } from '../protocol'

/** One action of a fake worker; its first key names it. README.md beside this file lists them. */
export type Action = Record<string, unknown>

/** What a fake worker does: `attempts` has one list for each process that the client starts, the last one again. */
export type Script = { worker: Action[] } | { attempts: Action[][] }

/** Gives the `command` of a fake worker that plays a script. */
export function fakeWorker(script: Script): string[]

/** Turns a recorded session, the lines that a worker printed, into a script. */
export function session(file: string): Script

/** Completes a message from a sample of its type, for tests of code that handles events. */
export function sample<T extends Message['type']>(
  type: T,
  fields?: Partial<Extract<Message, { type: T }>>,
): Extract<Message, { type: T }>
