// The package as others get it: packed on a bare checkout, loaded as ESM and as CommonJS, with types that hold.

import assert from 'node:assert/strict'
import { execFileSync, spawnSync } from 'node:child_process'
import fs from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'
import { test } from 'node:test'

import * as imported from 'trainwire'
import * as testing from 'trainwire/testing'

import { folder, packageFolder } from './helpers.mjs'

const require = createRequire(import.meta.url)
const manifest = JSON.parse(fs.readFileSync(path.join(packageFolder, 'package.json'), 'utf8'))

test('import and require give the same names and the same classes', () => {
  const required = require('trainwire')
  assert.deepEqual(Object.keys(imported).filter((name) => name !== 'default').sort(), Object.keys(required).sort())
  for (const name of Object.keys(required)) assert.equal(imported[name], required[name], name)
  const kit = require('trainwire/testing')
  assert.deepEqual(Object.keys(testing).filter((name) => name !== 'default').sort(), Object.keys(kit).sort())
})

test('the package has no dependencies at run time, and its lock file names no registry', () => {
  assert.equal(manifest.dependencies, undefined)
  const lock = fs.readFileSync(path.join(packageFolder, 'package-lock.json'), 'utf8')
  assert.doesNotMatch(lock, /"resolved"|https?:/)
})

test('a packed tarball works in an empty folder, as ESM and as CommonJS, and carries its types', { timeout: 240_000 }, (t) => {
  const dir = folder()
  const bare = path.join(dir, 'bare')
  fs.cpSync(packageFolder, bare, { recursive: true, filter: (from) => path.basename(from) !== 'node_modules' })
  const npm = (cwd, ...words) => execFileSync('npm', [...words, '--offline', '--no-audit', '--no-fund', '--cache', path.join(dir, 'cache')], { cwd, encoding: 'utf8' })
  const [{ filename, files }] = JSON.parse(npm(bare, 'pack', '--json'))
  const names = files.map((file) => file.path)
  for (const name of ['index.mjs', 'index.d.ts', 'protocol.d.ts', 'lib/index.js', 'testing/worker.js', 'testing/lines.json', 'mlx-tui.mjs', 'LICENSE', 'README.md']) {
    assert.ok(names.includes(name), `${name} is not in ${names}`)
  }
  assert.ok(!names.some((name) => name.startsWith('test/')))

  const empty = path.join(dir, 'empty')
  fs.mkdirSync(empty)
  fs.writeFileSync(path.join(empty, 'package.json'), '{}')
  npm(empty, 'install', path.join(bare, filename))
  const body = `
    const command = fakeWorker({ worker: [{ hello: {} }, { start: {} }, { steps: 2 }, { finish: {} }] })
    const run = await launch({ model: 'm', data: 'd', run_dir: 'run' }, { command })
    const types = []
    for await (const event of run) types.push(event.type)
    console.log(types.join(' '), (await run.wait()).exitCode)
  `
  fs.writeFileSync(path.join(empty, 'a.mjs'), `import { launch } from 'trainwire'\nimport { fakeWorker } from 'trainwire/testing'\n${body}`)
  fs.writeFileSync(
    path.join(empty, 'b.cjs'),
    `const { launch } = require('trainwire')\nconst { fakeWorker } = require('trainwire/testing')\n;(async () => {${body}})()`,
  )
  for (const file of ['a.mjs', 'b.cjs']) {
    fs.rmSync(path.join(empty, 'run'), { recursive: true, force: true })
    // What `require` of an ES module would need is not there on every Node 20.
    const flags = file === 'b.cjs' && process.allowedNodeEnvironmentFlags.has('--no-experimental-require-module') ? ['--no-experimental-require-module'] : []
    const done = spawnSync(process.execPath, [...flags, file], { cwd: empty, encoding: 'utf8' })
    assert.equal(done.stdout, 'attempt init step step complete end 0\n', done.stderr)
    assert.equal(done.stderr, '')
  }
})

test('the declarations compile and refuse what is wrong', { timeout: 240_000, skip: !fs.existsSync(path.join(packageFolder, 'node_modules', 'typescript')) && 'npm ci has not been run' }, () => {
  const tsc = path.join(packageFolder, 'node_modules', '.bin', 'tsc')
  const done = spawnSync(tsc, ['-p', path.join(packageFolder, 'test', 'types')], { encoding: 'utf8' })
  assert.equal(done.stdout + done.stderr, '')
})
