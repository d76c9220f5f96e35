// Lets `import 'electron'` find the stub.

import { register } from 'node:module'

const stub = new URL('electron-stub.mjs', import.meta.url).href
const hook = `export const resolve = (name, context, next) =>
  name === 'electron' ? { url: ${JSON.stringify(stub)}, shortCircuit: true } : next(name, context)`
register(`data:text/javascript,${encodeURIComponent(hook)}`)
