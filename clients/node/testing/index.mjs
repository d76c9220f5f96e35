import testing from './index.js'

export const { fakeWorker, session, sample } = testing
