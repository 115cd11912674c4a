//! A small HTTP server for programs that have none of their own.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::Registry;
use tokio::net::TcpListener;

/// How long a client may take for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Before trying to accept again when the process has no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Answers `GET /metrics` on `listener` with the series of `registry`, for ever.
pub async fn serve(listener: TcpListener, registry: Registry) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let registry = registry.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answer = answer(&request, &registry);
                async move { Ok::<_, Infallible>(answer) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection for metrics broke off");
            }
        });
    }
}

fn answer<B>(request: &Request<B>, registry: &Registry) -> Response<Full<Bytes>> {
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => match crate::text(registry) {
            Ok(text) => (StatusCode::OK, crate::CONTENT_TYPE, text),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", format!("{error}\n")),
        },
        (method, "/metrics") => {
            (StatusCode::METHOD_NOT_ALLOWED, "text/plain", format!("{method} is not supported, GET is\n"))
        }
        (_, path) => (StatusCode::NOT_FOUND, "text/plain", format!("there is no {path} here; /metrics is\n")),
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use prometheus::IntCounter;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn metrics_are_served_and_nothing_else() {
        let registry = Registry::new();
        let counter = IntCounter::new("things_total", "Things.").unwrap();
        registry.register(Box::new(counter.clone())).unwrap();
        counter.inc_by(3);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, registry));
        for (line, status, words) in [
            ("GET /metrics", "200 OK", "things_total 3\n"),
            ("POST /metrics", "405 Method Not Allowed", "GET is"),
            ("GET /", "404 Not Found", "/metrics is"),
        ] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let request = format!("{line} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await.unwrap();
            assert!(reply.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{reply}");
            assert!(reply.contains(words), "{reply}");
        }
    }
}
