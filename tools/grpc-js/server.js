// A server of @grpc/grpc-js that serves a descriptor set and reflects it.
//
//   node server.js DESCRIPTOR-SET ADDRESS [without]
//
// Unary methods are answered with its own name, as a
// google.protobuf.StringValue. It prints where it listens, and serves until it
// is killed. With "without" it serves no reflection.
const fs = require('fs');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const { ReflectionService } = require('@grpc/reflection');

const [set, address, without] = process.argv.slice(2);
const definition = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(set));
const server = new grpc.Server();
for (const service of Object.values(definition)) {
  const methods = Object.entries(service).filter(([, m]) => m.path !== undefined);
  if (methods.length > 0) {
    const unary = (call, done) => done(null, { value: 'grpc-js' });
    server.addService(service, Object.fromEntries(methods.map(([name, m]) => [name, m.responseStream ? (call) => call.end() : unary])));
  }
}
if (without !== 'without') {
  new ReflectionService(definition).addToServer(server);
}
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (err, port) => {
  if (err) throw err;
  console.log(`listening ${address.slice(0, address.lastIndexOf(':'))}:${port}`);
});
