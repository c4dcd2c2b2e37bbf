// The usual receiver in Node: octokit verifies, BullMQ keeps the job on Redis under the
// delivery's id. It keeps what our job keeps of the payload, not all of it.
import http from 'node:http'
import { Webhooks } from '@octokit/webhooks'
import { Queue } from 'bullmq'

const [port, redis, secret] = process.argv.slice(2)
const queue = new Queue('bench', { connection: { host: '127.0.0.1', port: +redis } })
const webhooks = new Webhooks({ secret })
webhooks.on('issues.labeled', ({ id, payload }) => {
  const { repository, issue, label, sender } = payload
  const kept = { repo: repository.full_name, number: issue.number, title: issue.title,
    body: issue.body, label: label.name, by: sender.id }
  return queue.add('fix-issue', kept, { jobId: id })
})
await queue.waitUntilReady()

http.createServer((request, response) => {
  const parts = []
  request.on('data', part => parts.push(part))
  request.on('end', async () => {
    const { headers } = request
    try {
      await webhooks.verifyAndReceive({
        id: headers['x-github-delivery'],
        name: headers['x-github-event'],
        payload: Buffer.concat(parts).toString('utf8'),
        signature: headers['x-hub-signature-256'],
      })
      response.writeHead(202, { 'content-type': 'application/json' })
    } catch {
      response.statusCode = 500
    }
    response.end('{"status":"queued"}')
  })
}).listen(+port, '127.0.0.1', 128)
