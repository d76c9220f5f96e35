'use strict'

const { createHash } = require('node:crypto')
const { createReadStream } = require('node:fs')
const fs = require('node:fs/promises')
const path = require('node:path')
const { pipeline } = require('node:stream/promises')

const MANIFEST = 'manifest.json'
const ABANDONED = 'abandoned'

async function readManifest(folder) {
  try {
    const manifest = JSON.parse(await fs.readFile(path.join(folder, MANIFEST), 'utf8'))
    return Number.isInteger(manifest?.step) && manifest.files instanceof Object ? manifest : undefined
  } catch {
    return undefined
  }
}

async function sha256(file) {
  const hash = createHash('sha256')
  await pipeline(createReadStream(file), hash)
  return hash.digest('hex')
}

/** Says whether every file is there as the manifest says. */
async function isWhole(folder, manifest, verify) {
  for (const [name, expected] of Object.entries(manifest.files)) {
    const file = path.join(folder, name)
    const stat = await fs.stat(file).catch(() => undefined)
    if (stat?.size !== expected.size) return false
    if (verify && (await sha256(file)) !== expected.sha256) return false
  }
  return true
}

const rank = ({ path: folder }) => (path.basename(folder) === 'final' ? 0 : path.basename(folder) === 'best' ? 2 : 1)

/**
 * Finds the newest whole checkpoint of a run: `{path, step, kind, bytes}`, or null. Its files must have the sizes and,
 * with `verify`, the hashes of its manifest.
 */
async function latestCheckpoint(runDir, { verify = true } = {}) {
  const entries = await fs.readdir(runDir, { withFileTypes: true }).catch(() => [])
  const found = []
  for (const entry of entries) {
    if (!entry.isDirectory() || entry.name.startsWith('.') || entry.name === ABANDONED) continue
    const folder = path.resolve(runDir, entry.name)
    const manifest = await readManifest(folder)
    if (manifest) found.push({ path: folder, manifest })
  }
  found.sort((a, b) => b.manifest.step - a.manifest.step || rank(a) - rank(b) || (a.path < b.path ? -1 : 1))
  for (const { path: folder, manifest } of found) {
    if (await isWhole(folder, manifest, verify)) {
      const bytes = Object.values(manifest.files).reduce((sum, file) => sum + file.size, 0)
      return { path: folder, step: manifest.step, kind: manifest.kind, bytes }
    }
  }
  return null
}

module.exports = { latestCheckpoint }
