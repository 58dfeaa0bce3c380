"""A server of grpcio that serves a descriptor set and reflects it (v1alpha).

    server.py DESCRIPTOR-SET ADDRESS REFLECTION-SET [without]

Unary methods are answered with its own name, as a google.protobuf.StringValue.
It prints where it listens, and serves until it is killed. With "without" it
serves no reflection. REFLECTION-SET holds grpc/reflection/v1/reflection.proto,
of which the messages are those of v1alpha too: Debian has grpcio and not its
reflection package, whose servicer this one does as.
"""
import sys
from concurrent import futures

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def load(path, pool):
    """Puts a descriptor set into the pool, imports first, and returns its files."""
    with open(path, "rb") as f:
        files = {fd.name: fd for fd in descriptor_pb2.FileDescriptorSet.FromString(f.read()).file}
    done = set()

    def add(name):
        if name in done or name not in files:
            return
        done.add(name)
        for dep in files[name].dependency:
            add(dep)
        pool.Add(files[name])

    for name in files:
        add(name)
    return files


class Reflection:
    """Answers as grpcio-reflection does: with all that a file imports."""

    def __init__(self, pool, services, path):
        self.pool, self.services = pool, services
        own = descriptor_pool.DescriptorPool()
        load(path, own)
        factory = message_factory.MessageFactory(own)
        message = lambda name: factory.GetPrototype(own.FindMessageTypeByName("grpc.reflection.v1." + name))
        self.request, self.response = message("ServerReflectionRequest"), message("ServerReflectionResponse")

    def files(self, response, file):
        seen, waiting = set(), [file]
        while waiting:
            fd = waiting.pop()
            if fd.name not in seen:
                seen.add(fd.name)
                response.file_descriptor_response.file_descriptor_proto.append(fd.serialized_pb)
                waiting.extend(fd.dependencies)

    def answer(self, request):
        response = self.response(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        try:
            if kind == "list_services":
                for name in self.services:
                    response.list_services_response.service.add(name=name)
            elif kind == "file_containing_symbol":
                self.files(response, self.pool.FindFileContainingSymbol(request.file_containing_symbol))
            elif kind == "file_by_filename":
                self.files(response, self.pool.FindFileByName(request.file_by_filename))
            else:
                response.error_response.error_code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
        except KeyError:
            response.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            response.error_response.error_message = grpc.StatusCode.NOT_FOUND.value[1]
        return response

    def handler(self):
        return grpc.method_handlers_generic_handler("grpc.reflection.v1alpha.ServerReflection", {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                lambda requests, _: map(self.answer, requests),
                request_deserializer=self.request.FromString,
                response_serializer=self.response.SerializeToString,
            ),
        })


def main(path, address, reflection, without=None):
    pool = descriptor_pool.DescriptorPool()
    services = {}
    for fd in load(path, pool).values():
        for service in fd.service:
            services[f"{fd.package}.{service.name}"] = service
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    say = b"\x0a\x06grpcio"
    for name, service in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {
            m.name: grpc.unary_stream_rpc_method_handler(lambda *_: iter(()))
            if m.server_streaming else grpc.unary_unary_rpc_method_handler(lambda *_: say)
            for m in service.method
        }),))
    if without is None:
        listed = ["grpc.reflection.v1alpha.ServerReflection", *services]
        server.add_generic_rpc_handlers((Reflection(pool, listed, reflection).handler(),))
    port = server.add_insecure_port(address)
    server.start()
    print(f"listening {address.rpartition(':')[0]}:{port}", flush=True)
    server.wait_for_termination()


main(*sys.argv[1:])
