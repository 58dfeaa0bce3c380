import com.google.protobuf.DescriptorProtos.FileDescriptorProto;
import com.google.protobuf.DescriptorProtos.FileDescriptorSet;
import com.google.protobuf.Descriptors;
import com.google.protobuf.Descriptors.FileDescriptor;
import io.grpc.MethodDescriptor;
import io.grpc.ServerServiceDefinition;
import io.grpc.ServiceDescriptor;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.ProtoFileDescriptorSupplier;
import io.grpc.protobuf.services.ProtoReflectionService;
import io.grpc.protobuf.services.ProtoReflectionServiceV1;
import io.grpc.stub.ServerCalls;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.net.InetSocketAddress;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;

/**
 * A server of grpc-java that serves a descriptor set and reflects it, v1 and
 * v1alpha.
 *
 * <pre>java Server.java DESCRIPTOR-SET HOST:PORT [without]</pre>
 *
 * Unary methods are answered with its own name, as a
 * google.protobuf.StringValue. It prints where it listens, and serves until it
 * is killed. With "without" it serves no reflection.
 */
public final class Server {
  private static final byte[] SAY = "\n\tgrpc-java".getBytes();

  public static void main(String[] args) throws Exception {
    Map<String, FileDescriptorProto> protos = new HashMap<>();
    for (FileDescriptorProto f : FileDescriptorSet.parseFrom(Files.readAllBytes(Path.of(args[0]))).getFileList()) {
      protos.put(f.getName(), f);
    }
    Map<String, FileDescriptor> files = new HashMap<>();
    int colon = args[1].lastIndexOf(':');
    String host = args[1].substring(0, colon);
    NettyServerBuilder builder =
        NettyServerBuilder.forAddress(new InetSocketAddress(host, Integer.parseInt(args[1].substring(colon + 1))));
    for (String name : protos.keySet()) {
      for (Descriptors.ServiceDescriptor s : link(name, protos, files).getServices()) {
        builder.addService(define(s));
      }
    }
    if (args.length < 3 || !args[2].equals("without")) {
      builder.addService(ProtoReflectionServiceV1.newInstance());
      builder.addService(ProtoReflectionService.newInstance());
    }
    io.grpc.Server server = builder.build().start();
    System.out.println("listening " + host + ":" + server.getPort());
    server.awaitTermination();
  }

  /** Links a file after all that it imports. */
  private static FileDescriptor link(String name, Map<String, FileDescriptorProto> protos, Map<String, FileDescriptor> files)
      throws Descriptors.DescriptorValidationException {
    FileDescriptor done = files.get(name);
    if (done != null) {
      return done;
    }
    FileDescriptorProto proto = protos.get(name);
    FileDescriptor[] imports = new FileDescriptor[proto.getDependencyCount()];
    for (int i = 0; i < imports.length; i++) {
      imports[i] = link(proto.getDependency(i), protos, files);
    }
    FileDescriptor file = FileDescriptor.buildFrom(proto, imports);
    files.put(name, file);
    return file;
  }

  private static ServerServiceDefinition define(Descriptors.ServiceDescriptor s) {
    Map<String, MethodDescriptor<byte[], byte[]>> methods = new HashMap<>();
    ServiceDescriptor.Builder service =
        ServiceDescriptor.newBuilder(s.getFullName()).setSchemaDescriptor((ProtoFileDescriptorSupplier) s::getFile);
    for (Descriptors.MethodDescriptor m : s.getMethods()) {
      MethodDescriptor<byte[], byte[]> method =
          MethodDescriptor.newBuilder(new Bytes(), new Bytes())
              .setFullMethodName(MethodDescriptor.generateFullMethodName(s.getFullName(), m.getName()))
              .setType(m.isServerStreaming() ? MethodDescriptor.MethodType.SERVER_STREAMING : MethodDescriptor.MethodType.UNARY)
              .build();
      methods.put(m.getName(), method);
      service.addMethod(method);
    }
    ServerServiceDefinition.Builder b = ServerServiceDefinition.builder(service.build());
    for (MethodDescriptor<byte[], byte[]> method : methods.values()) {
      if (method.getType() == MethodDescriptor.MethodType.UNARY) {
        b.addMethod(method, ServerCalls.asyncUnaryCall((request, response) -> {
          response.onNext(SAY);
          response.onCompleted();
        }));
      } else {
        b.addMethod(method, ServerCalls.asyncServerStreamingCall((request, response) -> response.onCompleted()));
      }
    }
    return b.build();
  }

  /** Messages as they are on the wire. */
  private static final class Bytes implements MethodDescriptor.Marshaller<byte[]> {
    @Override
    public InputStream stream(byte[] value) {
      return new ByteArrayInputStream(value);
    }

    @Override
    public byte[] parse(InputStream stream) {
      try {
        return stream.readAllBytes();
      } catch (IOException e) {
        throw new UncheckedIOException(e);
      }
    }
  }
}
