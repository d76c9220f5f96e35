'use strict'

const { attach } = require('./attach.js')
const { latestCheckpoint } = require('./checkpoints.js')
const errors = require('./errors.js')
const { history, METRICS } = require('./history.js')
const { launch, validate } = require('./launch.js')

module.exports = { launch, attach, validate, history, METRICS, latestCheckpoint, ...errors }
