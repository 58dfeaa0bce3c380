// A tonic server that reflects a descriptor set.
//
//   tonic DESCRIPTOR-SET ADDRESS [v1|v1alpha]
//
// It prints where it listens, and serves until it is killed.
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic_reflection::server::Builder;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let set = std::fs::read(&args[1])?;
    let listener = TcpListener::bind(&args[2]).await?;
    println!("listening {}", listener.local_addr()?);
    let incoming = TcpListenerStream::new(listener);
    let reflect = Builder::configure().register_encoded_file_descriptor_set(&set);
    if args.get(3).is_some_and(|v| v == "v1alpha") {
        let service = reflect.build_v1alpha()?;
        Server::builder().add_service(service).serve_with_incoming(incoming).await?;
    } else {
        let service = reflect.build_v1()?;
        Server::builder().add_service(service).serve_with_incoming(incoming).await?;
    }
    Ok(())
}
