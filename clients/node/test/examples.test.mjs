// The examples do what they show.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import fs from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'
import { createInterface } from 'node:readline'
import { describe, test } from 'node:test'

import { attach, launch } from 'trainwire'

import { exists, folder, packageFolder, repository, until, withoutWorker, worker } from './helpers.mjs'

const examples = path.join(repository, 'examples')
const installed = fs.existsSync(path.join(examples, 'node_modules', 'uplot')) && fs.existsSync(path.join(examples, 'node_modules', 'trainwire'))
const skip = withoutWorker || (!installed && 'npm ci has not been run in examples/')
const CHROMIUM = ['/usr/bin/chromium', '/usr/bin/chromium-browser'].find((file) => fs.existsSync(file))

/** Writes a config, and a script by which a step takes 10 ms. */
function prepare(t, config = '', script = {}) {
  const dir = folder()
  fs.writeFileSync(path.join(dir, 'd.jsonl'), '{"text":"a"}\n')
  fs.writeFileSync(path.join(dir, 'example.toml'), `model = "m"\ndata = "d.jsonl"\nrun_dir = "run"\nmax_steps = 100000\n${config}`)
  fs.writeFileSync(path.join(dir, 'script.json'), JSON.stringify({ step_ms: 10, ...script }))
  return { dir, config: path.join(dir, 'example.toml'), workerArgs: ['--engine', 'fake', '--script', path.join(dir, 'script.json')] }
}

test('the Electron main process forwards events, takes orders, and stops the run when it quits', { skip, timeout: 180_000 }, async (t) => {
  const { dir, config, workerArgs } = prepare(t)
  const main = spawn(
    process.execPath,
    [
      ...['--import', path.join(packageFolder, 'test', 'electron-hook.mjs'), path.join(examples, 'electron-main', 'main.mjs')],
      ...[config, `--command=${worker.join(' ')}`, `--worker-args=${workerArgs.join(' ')}`],
    ],
    { stdio: ['pipe', 'pipe', 'inherit'] },
  )
  t.after(() => main.kill('SIGKILL'))
  const told = []
  createInterface({ input: main.stdout }).on('line', (line) => told.push(JSON.parse(line)))
  const events = () => told.filter(({ channel }) => channel === 'trainwire:events').flatMap(({ message }) => message)
  const ask = async (...args) => {
    const before = told.filter((line) => line.answer).length
    main.stdin.write(`${JSON.stringify({ channel: 'trainwire:order', args })}\n`)
    await until(`an answer to ${args[0]}`, () => told.filter((line) => line.answer).length > before)
    return told.filter((line) => line.answer).at(-1).answer
  }

  await until('steps arrive', () => events().filter((event) => event.type === 'step').length >= 20)
  assert.match(told[0].loaded, /index\.html$/)
  const batches = told.filter(({ channel }) => channel === 'trainwire:events').length
  assert.ok(batches < events().length, 'events are sent in batches')

  assert.equal((await ask('pause')).answer.changed, true)
  await until('the pause arrives', () => events().some((event) => event.type === 'paused'))
  assert.equal((await ask('set', { learning_rate: -1 })).code, 'bad_params')
  assert.match((await ask('format_disk')).error, /no order/)
  assert.equal((await ask('resume')).answer.changed, true)

  main.stdin.write('{"quit":true}\n')
  assert.deepEqual(await once(main, 'exit'), [0, null])
  const result = await (await attach(path.join(dir, 'run'))).wait()
  assert.equal(result.outcome, 'stopped')
  assert.ok(result.checkpoint)
})

/** Serves a fresh run. */
async function serveRun(t, config, script) {
  const { serve } = await import(path.join(examples, 'browser', 'server.mjs'))
  const prepared = prepare(t, config, script)
  const run = await launch(prepared.config, { command: worker, workerArgs: prepared.workerArgs })
  const server = await serve(run)
  t.after(async () => {
    server.closeAllConnections()
    server.close()
    await run.kill()
  })
  return { run, port: server.address().port, url: `http://127.0.0.1:${server.address().port}/` }
}

test('the browser server refuses other sites, other names and other commands', { skip, timeout: 180_000 }, async (t) => {
  const { run, url, port } = await serveRun(t)
  await until('the run trains', () => run.step > 0)
  const post = (headers, body = '{"cmd":"pause"}') => fetch(`${url}command`, { method: 'POST', headers, body })
  const json = { 'content-type': 'application/json' }
  assert.equal((await post({ ...json, origin: 'http://evil.example' })).status, 403)
  assert.equal((await post({ 'content-type': 'text/plain' })).status, 415)
  assert.equal((await post(json, '{"cmd":"detach"}')).status, 404)
  assert.equal((await post(json, '{')).status, 400)
  assert.equal((await post(json, JSON.stringify({ cmd: 'set', values: { a: 'x'.repeat(20_000) } }))).status, 413)
  assert.equal((await fetch(`${url}nowhere`)).status, 404)
  assert.equal((await fetch(`${url}..%2f..%2fpackage.json`)).status, 404)
  const refused = await post(json, '{"cmd":"set","values":{"learning_rate":-1}}')
  assert.equal(refused.status, 409)
  assert.match((await refused.json()).message, /learning_rate/)
  assert.equal((await post({ ...json, origin: `http://127.0.0.1:${port}` })).status, 200)
})

test('a page that reads nothing lags alone', { skip, timeout: 180_000 }, async (t) => {
  const { run, url } = await serveRun(t, '', { step_ms: 0 })
  const sleeper = await fetch(`${url}events`)
  await until('many steps were done', () => run.step > 3000)
  // The other page gets its snapshot and its events at once.
  const reader = (await fetch(`${url}events`)).body.getReader()
  let text = ''
  while (!text.includes('event: run')) text += Buffer.from((await reader.read()).value).toString()
  const shot = JSON.parse(/event: snapshot\ndata: (.*)\n/.exec(text)[1])
  assert.ok(shot.series.loss.steps.length <= 1000)
  await reader.cancel()
  await sleeper.body.cancel()
})

test('the server as a command follows a run and leaves it alone', { skip, timeout: 180_000 }, async (t) => {
  const { dir, config, workerArgs } = prepare(t)
  const run = await launch(config, { command: worker, workerArgs })
  t.after(() => run.kill())
  await until('the run is there', () => run.step > 0)
  const server = spawn(process.execPath, [path.join(examples, 'browser', 'server.mjs'), path.join(dir, 'run'), '--port=0'], { stdio: ['ignore', 'pipe', 'inherit'] })
  t.after(() => server.kill('SIGKILL'))
  const [line] = await once(createInterface({ input: server.stdout }), 'line')
  const answer = await fetch(`${line}command`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: '{"cmd":"pause"}' })
  assert.equal((await answer.json()).changed, true)
  server.kill('SIGINT')
  assert.deepEqual(await once(server, 'exit'), [0, null])
  assert.ok(exists(run.pid))
  await run.close()
})

const without = skip || (!CHROMIUM && 'Chromium is not installed')

describe('the page in Chromium', { skip: without }, () => {
  const launchBrowser = () => {
    const { chromium } = createRequire(path.join(examples, 'package.json'))('playwright-core')
    return chromium.launch({ executablePath: CHROMIUM, args: ['--no-sandbox', '--disable-dev-shm-usage'] })
  }

  /** Opens the page and fails the test on any error in it. */
  async function open(browser, url, viewport) {
    const page = await browser.newPage({ viewport })
    const errors = []
    page.on('pageerror', (error) => errors.push(error.message))
    page.on('console', (message) => message.type() === 'error' && errors.push(message.text()))
    await page.goto(url)
    return { page, errors }
  }

  const badge = (page, text) => page.waitForFunction((wanted) => document.getElementById('phase').textContent === wanted, text)
  const stepOf = async (page) => Number(/step (\d+)/.exec(await page.textContent('#steps'))?.[1] ?? 0)
  /** Counts the pixels that the chart's curves have coloured. */
  const ink = (page) =>
    page.evaluate(() => {
      const canvas = document.querySelector('#chart canvas')
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
      let count = 0
      for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 0 && data[i + 2] - data[i] > 60) count += 1
      return count
    })

  test('it draws the loss, pauses, changes the learning rate, survives a reload, and stops', { timeout: 180_000 }, async (t) => {
    const { run, url } = await serveRun(t, 'eval_every = 20\n', { valid_examples: 4, loss: { start: 3, end: 0.5, half_life: 30 } })
    const browser = await launchBrowser()
    t.after(() => browser.close())
    const { page, errors } = await open(browser, url, { width: 1280, height: 900 })
    await badge(page, 'running')
    await page.waitForFunction(() => /step [4-9]\d/.test(document.getElementById('steps').textContent))
    assert.equal(await page.textContent('#name'), 'example')
    assert.match(await page.textContent('#loss'), /^\d\.\d{3}$/)
    assert.match(await page.textContent('#valid'), /^\d\.\d{3}$/)
    assert.ok((await ink(page)) > 300, 'the curve is drawn')

    await page.click('#pause')
    await badge(page, 'paused')
    await until('the page shows the last step', async () => (await stepOf(page)) === run.step)
    const drawn = await ink(page)

    await page.reload()
    await badge(page, 'paused')
    assert.equal(await stepOf(page), run.step)
    assert.ok(Math.abs((await ink(page)) - drawn) < drawn / 2, 'the curve is there again')
    assert.equal(await page.inputValue('#set-learning_rate'), '0.0001')

    await page.fill('#set-learning_rate', '-1')
    await page.click('.setting:has(#set-learning_rate) button')
    assert.equal(await page.textContent('#said'), '', 'the schema keeps a wrong value from being sent')
    await page.fill('#set-learning_rate', '5e-5')
    await page.press('#set-learning_rate', 'Enter')
    await page.waitForFunction(() => document.getElementById('said').textContent.includes('from step'))
    assert.match(await page.textContent('#said'), /learning rate is 0\.00005 from step \d+ on/)

    await page.click('summary')
    const keys = await page.$$eval('.setting label', (labels) => labels.map((label) => label.textContent))
    assert.ok(keys.includes('save every') && keys.includes('sample display'), String(keys))

    await page.click('#pause')
    await badge(page, 'running')
    page.once('dialog', (dialog) => dialog.accept())
    await page.click('#stop')
    await badge(page, 'stopped')
    assert.equal(run.result.outcome, 'stopped')
    assert.ok(await page.isDisabled('#pause'))
    await page.reload()
    await badge(page, 'stopped')
    assert.ok((await ink(page)) > 300)
    assert.deepEqual(errors, [])
  })

  test('it fits a phone', { timeout: 180_000 }, async (t) => {
    const { run, url } = await serveRun(t)
    const browser = await launchBrowser()
    t.after(() => browser.close())
    const { page, errors } = await open(browser, url, { width: 390, height: 844 })
    await badge(page, 'running')
    await page.waitForFunction(() => /step \d\d/.test(document.getElementById('steps').textContent))
    await page.click('summary')
    const { scroll, small, outside } = await page.evaluate(() => {
      const controls = [...document.querySelectorAll('button, input, select')].map((element) => element.getBoundingClientRect())
      return {
        scroll: document.documentElement.scrollWidth,
        small: controls.filter((box) => box.height < 40).length,
        outside: controls.filter((box) => box.left < 0 || box.right > innerWidth).length,
      }
    })
    assert.deepEqual({ scroll, small, outside }, { scroll: 390, small: 0, outside: 0 })
    const chart = await page.evaluate(() => document.querySelector('#chart canvas').getBoundingClientRect().width)
    assert.ok(chart > 250 && chart <= 390, `the chart is ${chart} wide`)
    await page.setViewportSize({ width: 844, height: 390 })
    await page.waitForFunction((before) => document.querySelector('#chart canvas').getBoundingClientRect().width > before + 200, chart)
    assert.deepEqual(errors, [])
    await run.close()
  })
})
