'use strict'

const { ClientError } = require('./errors.js')

const ESCAPES = { b: '\b', t: '\t', n: '\n', f: '\f', r: '\r', e: '\x1b', '"': '"', '\\': '\\' }
const NUMBER = /^[+-]?(?:inf|nan|0x[0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d[\d_]*)?)$/

/**
 * Reads the TOML of a config file: tables, dotted keys, texts, numbers, booleans, lists, inline tables. Dates, which
 * no key of a config takes, are refused. Throws ClientError with the line that does not parse.
 */
class TomlReader {
  #text
  #at = 0

  constructor(text) {
    this.#text = text.replace(/^\uFEFF/, '').replaceAll('\r\n', '\n')
  }

  read() {
    const root = {}
    let table = root
    for (;;) {
      this.#skip(/[\s]*(?:#[^\n]*\n?\s*)*/y)
      if (this.#at >= this.#text.length) return root
      if (this.#text[this.#at] === '[') {
        if (this.#text[this.#at + 1] === '[') this.#fail('a list of tables has no place in a config')
        this.#at += 1
        const keys = this.#key()
        this.#expect(']')
        table = this.#table(root, keys)
      } else this.#pair(table)
      this.#skip(/[ \t]*(?:#[^\n]*)?/y)
      if (this.#at < this.#text.length) this.#expect('\n')
    }
  }

  #skip(pattern) {
    pattern.lastIndex = this.#at
    const match = pattern.exec(this.#text)
    if (match) this.#at = pattern.lastIndex
    return match?.[0]
  }

  #fail(what) {
    const line = this.#text.slice(0, this.#at).split('\n').length
    throw new ClientError(`is not TOML: ${what} (line ${line})`)
  }

  #expect(word) {
    this.#skip(/[ \t]*/y)
    if (!this.#text.startsWith(word, this.#at)) this.#fail(`expected ${JSON.stringify(word)}`)
    this.#at += word.length
  }

  #key() {
    const keys = []
    do {
      this.#skip(/[ \t]*/y)
      const first = this.#text[this.#at]
      if (first === '"' || first === "'") keys.push(this.#string())
      else keys.push(this.#skip(/[A-Za-z0-9_-]+/y) ?? this.#fail('expected a key'))
      this.#skip(/[ \t]*/y)
    } while (this.#text[this.#at] === '.' && ++this.#at)
    return keys
  }

  #table(from, keys) {
    let table = from
    for (const key of keys) {
      if (!Object.hasOwn(table, key)) define(table, key, {})
      table = table[key]
      if (typeof table !== 'object' || Array.isArray(table)) this.#fail(`${key} is no table`)
    }
    return table
  }

  #pair(table) {
    const keys = this.#key()
    const last = keys.pop()
    const target = this.#table(table, keys)
    if (Object.hasOwn(target, last)) this.#fail(`${last} stands there twice`)
    this.#expect('=')
    define(target, last, this.#value())
  }

  #value() {
    this.#skip(/[ \t]*/y)
    const first = this.#text[this.#at]
    if (first === '"' || first === "'") return this.#string()
    if (first === '[') return this.#list()
    if (first === '{') return this.#inline()
    const word = this.#skip(/[^\s,#\]}]+/y) ?? this.#fail('expected a value')
    if (word === 'true' || word === 'false') return word === 'true'
    if (!NUMBER.test(word) || /^[+-]?0\d|__|_$|_\.|\._/.test(word)) {
      this.#fail(`${word} is no value; text stands in quotes`)
    }
    const plain = word.replaceAll('_', '')
    const named = /^([+-]?)(inf|nan)$/.exec(plain)
    if (named) return (named[1] === '-' ? -1 : 1) * (named[2] === 'inf' ? Infinity : NaN)
    return Number(plain)
  }

  #list() {
    const blank = /\s*(?:#[^\n]*\n\s*)*/y
    const items = []
    this.#at += 1
    for (;;) {
      this.#skip(blank)
      if (this.#text[this.#at] === ']') break
      items.push(this.#value())
      this.#skip(blank)
      if (this.#text[this.#at] === ',') this.#at += 1
      else if (this.#text[this.#at] !== ']') this.#fail('expected "," or "]"')
    }
    this.#at += 1
    return items
  }

  #inline() {
    const table = {}
    this.#at += 1
    this.#skip(/[ \t]*/y)
    if (this.#text[this.#at] === '}') {
      this.#at += 1
      return table
    }
    for (;;) {
      this.#pair(table)
      this.#skip(/[ \t]*/y)
      const next = this.#text[this.#at++]
      if (next === '}') return table
      if (next !== ',') this.#fail('expected "," or "}"')
    }
  }

  #string() {
    const quote = this.#text[this.#at]
    const long = this.#text.startsWith(quote.repeat(3), this.#at)
    const end = long ? quote.repeat(3) : quote
    this.#at += end.length
    if (long && this.#text[this.#at] === '\n') this.#at += 1
    let text = ''
    for (;;) {
      const char = this.#text[this.#at]
      if (char === undefined || (char === '\n' && !long)) this.#fail('a text does not end')
      if (this.#text.startsWith(end, this.#at)) {
        // Up to two quotes may stand right before the three that end a long text.
        while (long && this.#text[this.#at + 3] === quote) {
          text += quote
          this.#at += 1
        }
        this.#at += end.length
        return text
      }
      this.#at += 1
      text += char === '\\' && quote === '"' ? this.#escape(long) : char
    }
  }

  #escape(long) {
    if (long && this.#skip(/[ \t]*\n\s*/y) !== undefined) return ''
    const char = this.#text[this.#at++]
    if (Object.hasOwn(ESCAPES, char ?? '')) return ESCAPES[char]
    const length = { x: 2, u: 4, U: 8 }[char]
    const digits = this.#text.slice(this.#at, this.#at + (length ?? 0))
    if (!length || !/^[0-9a-fA-F]+$/.test(digits) || digits.length !== length) this.#fail(`\\${char} is no escape`)
    this.#at += length
    const code = Number.parseInt(digits, 16)
    if (code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) this.#fail(`\\${char}${digits} is no character`)
    return String.fromCodePoint(code)
  }
}

function define(table, key, value) {
  Object.defineProperty(table, key, { value, enumerable: true, configurable: true, writable: true })
}

const parseToml = (text) => new TomlReader(text).read()

module.exports = { parseToml }
