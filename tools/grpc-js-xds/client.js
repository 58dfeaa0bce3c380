// A client of @grpc/grpc-js with its xDS support, that does as it is told by
// lines, one at a time; tools/grpcio/client.py says which.
const readline = require('readline');
const grpc = require('@grpc/grpc-js');
require('@grpc/grpc-js-xds').register();

const SECONDS = 10;
// A google.protobuf.StringValue of less than 128 bytes.
const encode = (text) => Buffer.concat([Buffer.from(text ? [10, text.length] : []), Buffer.from(text)]);
const decode = (bytes) => bytes.subarray(2).toString();

const clients = {};
const client = (target) => (clients[target] ??= new grpc.Client(target, grpc.credentials.createInsecure()));
const deadline = () => Date.now() + 1000 * SECONDS;
let stream;

// first is the next message of a stream, or its end.
const first = (call) => new Promise((resolve, reject) => call.once('data', resolve).once('error', reject));

const unary = (target, path, waits) =>
  new Promise((resolve, reject) => {
    const meta = new grpc.Metadata({ waitForReady: waits });
    client(target).makeUnaryRequest(path, encode, decode, '', meta, { deadline: deadline() }, (err, value) => (err ? reject(err) : resolve(value)));
  });

const verbs = {
  unary: (target, path) => unary(target, path, false),
  probe: (target, path) => unary(target, path, true),
  watch: async (target, path) => {
    const call = client(target).makeServerStreamRequest(path, encode, decode, '', { deadline: deadline() });
    const value = await first(call);
    call.on('error', () => {}).cancel();
    return value;
  },
  open: async (target, path) => {
    stream = client(target).makeBidiStreamRequest(path, encode, decode).on('error', () => {});
    return '';
  },
  ask: (text) => {
    const answer = first(stream);
    stream.write(text);
    return answer;
  },
};

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [verb, ...args] = line.split(' ');
    try {
      console.log(`ok ${await verbs[verb](...args)}`);
    } catch (err) {
      console.log(`${grpc.status[err.code]} ${String(err.details).replace(/\s+/g, ' ')}`);
    }
  }
  process.exit(0);
})();
