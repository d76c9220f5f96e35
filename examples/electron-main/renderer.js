// The window: the newest step, the phase, three buttons.

const $ = (id) => document.getElementById(id)

window.trainwire.onEvents((events) => {
  for (const event of events) if (event.type === 'status') $('phase').textContent = event.phase
  const step = events.findLast((event) => event.type === 'step')
  if (!step) return
  const loss = step.loss?.toFixed(3) ?? 'not finite'
  $('step').textContent = `step ${step.step} of ${step.total_steps}, loss ${loss}`
})
window.trainwire.onOver(({ result, error }) => {
  $('phase').textContent = error ?? `${result.outcome}: ${result.reason}`
})
for (const name of ['pause', 'resume', 'stop']) {
  $(name).addEventListener('click', async () => {
    const { error } = await window.trainwire.order(name)
    $('said').textContent = error ?? ''
  })
}
