// A tonic server that reflects a descriptor set, and serves golden.v1.Cart of it.
//
//   tonic DESCRIPTOR-SET ADDRESS [v1|v1alpha]
//
// Calls are answered with its own name as a google.protobuf.StringValue, which
// on the wire is an Item with that name as well. It prints where it listens, and
// serves until it is killed.
use std::convert::Infallible;
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codegen::{http, BoxFuture, Service};
use tonic::server::{Grpc, NamedService, ServerStreamingService, UnaryService};
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tonic_reflection::server::Builder;

fn codec() -> ProstCodec<String, String> {
    ProstCodec::default()
}

struct Get;

impl UnaryService<String> for Get {
    type Response = String;
    type Future = BoxFuture<Response<String>, Status>;

    fn call(&mut self, _: Request<String>) -> Self::Future {
        Box::pin(async { Ok(Response::new("tonic".to_string())) })
    }
}

struct Watch;

impl ServerStreamingService<String> for Watch {
    type Response = String;
    type ResponseStream = tokio_stream::Once<Result<String, Status>>;
    type Future = BoxFuture<Response<Self::ResponseStream>, Status>;

    fn call(&mut self, _: Request<String>) -> Self::Future {
        Box::pin(async { Ok(Response::new(tokio_stream::once(Ok("tonic".to_string())))) })
    }
}

#[derive(Clone)]
struct Cart;

impl NamedService for Cart {
    const NAME: &'static str = "golden.v1.Cart";
}

impl Service<http::Request<Body>> for Cart {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            Ok(match req.uri().path() {
                "/golden.v1.Cart/Get" => Grpc::new(codec()).unary(Get, req).await,
                "/golden.v1.Cart/Watch" => Grpc::new(codec()).server_streaming(Watch, req).await,
                _ => Status::unimplemented("only Get and Watch").into_http(),
            })
        })
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let set = std::fs::read(&args[1])?;
    let listener = TcpListener::bind(&args[2]).await?;
    println!("listening {}", listener.local_addr()?);
    let incoming = TcpListenerStream::new(listener);
    let reflect = Builder::configure().register_encoded_file_descriptor_set(&set);
    let server = Server::builder().add_service(Cart);
    if args.get(3).is_some_and(|v| v == "v1alpha") {
        let service = reflect.build_v1alpha()?;
        server.add_service(service).serve_with_incoming(incoming).await?;
    } else {
        let service = reflect.build_v1()?;
        server.add_service(service).serve_with_incoming(incoming).await?;
    }
    Ok(())
}
