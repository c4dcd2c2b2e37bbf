// BullMQ in the queue bench: COUNT jobs put under their ids and taken again, so many
// commands on their way at once. The same jobs and words as queues.py has.
import fs from 'node:fs'
import { Queue, Worker } from 'bullmq'

const [port, name, workers, count, jobs] = process.argv.slice(2)
const connection = { host: '127.0.0.1', port: +port }
const items = JSON.parse(fs.readFileSync(jobs, 'utf8'))
const queue = new Queue(name, { connection })
const worker = new Worker(name, null, { connection, autorun: false })
await Promise.all([queue.waitUntilReady(), worker.waitUntilReady()])

async function rate(act, todo) {
  let next = 0
  const one = async () => { while (next < todo.length) await act(todo[next++]) }
  const began = process.hrtime.bigint()
  await Promise.all(Array.from({ length: +workers }, one))
  return todo.length / (Number(process.hrtime.bigint() - began) / 1e9)
}

const put = ([jobId, payload]) => queue.add('fix-issue', payload, { jobId })
const take = async () => {
  if (!await worker.getNextJob('token', { block: false })) throw new Error('no job')
}
const first = 16 + Math.floor(count / 10) // as queues.py warms
const warm = items.slice(0, first), measured = items.slice(first, first + +count)
await rate(put, warm)
const puts = await rate(put, measured)
await put(items[0])
const waiting = await queue.getWaitingCount()
if (waiting !== first + +count) throw new Error(`${waiting} wait`)
await rate(take, warm)
const takes = await rate(take, measured)
console.log(JSON.stringify({ put: puts, take: takes }))
process.exit(0)
