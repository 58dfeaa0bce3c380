"""A gRPC client of grpcio that does as it is told by lines, one at a time.

    unary TARGET PATH   one call; the answer
    watch TARGET PATH   a stream from the server; its first message, then it ends it
    open TARGET PATH    a stream both ways that stays; nothing
    ask TEXT            on that stream; the answer
    probe TARGET PATH   as unary, and waits for a server

Messages are google.protobuf.StringValue. It answers with "ok" and the value,
or with the code and the message, on one line. Channels stay open.
"""
import queue
import sys

import grpc
from google.protobuf.wrappers_pb2 import StringValue

SECONDS = 10  # less than the 15 s that gRPC waits for a name of xds:///

channels = {}
stream = None


def method(kind, target, path):
    if target not in channels:
        channels[target] = grpc.insecure_channel(target)
    return getattr(channels[target], kind)(path, StringValue.SerializeToString, StringValue.FromString)


class Chat:
    def __init__(self, target, path):
        self.said = queue.Queue()
        self.heard = method("stream_stream", target, path)(iter(self.said.get, None))

    def ask(self, text):
        self.said.put(StringValue(value=text))
        return next(self.heard).value


def do(verb, *args):
    global stream
    if verb in ("unary", "probe"):
        return method("unary_unary", *args)(StringValue(), timeout=SECONDS, wait_for_ready=verb == "probe").value
    if verb == "watch":
        call = method("unary_stream", *args)(StringValue(), timeout=SECONDS)
        value = next(call).value
        call.cancel()
        return value
    if verb == "open":
        stream = Chat(*args)
        return ""
    return stream.ask(*args)


for line in sys.stdin:
    try:
        print("ok", do(*line.split()), flush=True)
    except grpc.RpcError as e:
        print(e.code().name, " ".join(e.details().split()), flush=True)
