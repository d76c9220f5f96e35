// The window's only door: orders out, events in.

const { contextBridge, ipcRenderer } = require('electron')

contextBridge.exposeInMainWorld('trainwire', {
  order: (name, parameters) => ipcRenderer.invoke('trainwire:order', name, parameters),
  onEvents: (listener) => ipcRenderer.on('trainwire:events', (_, events) => listener(events)),
  onOver: (listener) => ipcRenderer.on('trainwire:over', (_, message) => listener(message)),
})
