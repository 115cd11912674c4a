//! The proxy's own paths: `/tether/…`, of which `/tether/` itself is the status page, and `/metrics` unless it has an address of its own.

use std::sync::Arc;

use http::header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use tether_dump::{RequestId, dump_path};

use crate::abort;
use crate::app::App;
use crate::body::Spliced;
use crate::dump_files;
use crate::error::json_response;
use crate::gate::error_chain;
use crate::page::Page;
use crate::reply::{FileBody, Kind};
use crate::upstream;

/// The answer, if the path is one of the proxy's own on its main address.
pub async fn answer<B>(app: &Arc<App>, request: &Request<B>) -> Option<Response<Kind>> {
    let path = request.uri().path();
    if path == "/metrics" && app.args.metrics_addr.is_none() {
        return Some(metrics(app));
    }
    let path = path.strip_prefix("/tether/")?;
    Some(match (path, path.strip_prefix("dumps/")) {
        ("live", _) => text(json_response(StatusCode::OK, &json!({ "live": true }))),
        ("ready", _) => text(ready(app).await),
        ("" | "status", _)
            if !app.args.no_page && request.method() != Method::GET && request.method() != Method::HEAD =>
        {
            let mut response = problem(StatusCode::METHOD_NOT_ALLOWED, "GET and HEAD are supported");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            text(response)
        }
        ("", _) if !app.args.no_page => text(Page::html()),
        ("status", _) if !app.args.no_page => text(Page::status(app, request.uri().query()).await),
        (_, Some(id)) => dump(app, request.method(), id).await,
        _ => text(problem(StatusCode::NOT_FOUND, format!("the proxy has no path /tether/{path}"))),
    })
}

/// The answer on the address for metrics.
pub async fn answer_on_metrics<B>(app: &Arc<App>, request: &Request<B>) -> Response<Kind> {
    match request.uri().path() {
        "/metrics" => metrics(app),
        "/tether/live" => text(json_response(StatusCode::OK, &json!({ "live": true }))),
        "/tether/ready" => text(ready(app).await),
        path => text(problem(StatusCode::NOT_FOUND, format!("there is no {path} here; /metrics is"))),
    }
}

fn text(response: Response<String>) -> Response<Kind> {
    response.map(|text| Kind::Full(text.into()))
}

fn problem(status: StatusCode, message: impl Into<String>) -> Response<String> {
    let message: String = message.into();
    json_response(status, &json!({ "error": { "message": message, "code": status.as_u16() } }))
}

fn metrics(app: &App) -> Response<Kind> {
    match app.metrics.text() {
        Ok(body) => {
            let mut response = Response::new(body);
            let kind = HeaderValue::from_static(tether_telemetry::CONTENT_TYPE);
            response.headers_mut().insert(CONTENT_TYPE, kind);
            text(response)
        }
        Err(error) => text(problem(StatusCode::INTERNAL_SERVER_ERROR, error_chain(&error))),
    }
}

/// Ready as long as it is not draining and an upstream is healthy by its own `/health`.
async fn ready(app: &Arc<App>) -> Response<String> {
    let probe = |upstream: Arc<upstream::Upstream>| {
        let app = app.clone();
        async move {
            let request = upstream::Request {
                method: Method::GET,
                target: PathAndQuery::from_static("/health"),
                headers: HeaderMap::new(),
                body: Spliced::from(bytes::Bytes::new()),
                has_body: false,
            };
            let result = abort::ask(&app, &upstream, request).await;
            let healthy = matches!(result, Ok(status) if status.is_success());
            let detail = match result {
                Ok(status) => Value::from(status.as_u16()),
                Err(error) => Value::from(error_chain(&error)),
            };
            (healthy, json!({ "url": upstream.url(), "healthy": healthy, "health": detail }))
        }
    };
    let probes = app.upstreams.all().iter().cloned().map(probe);
    let (healthy, upstreams): (Vec<bool>, Vec<Value>) =
        futures_util::future::join_all(probes).await.into_iter().unzip();
    let draining = app.is_draining();
    let ready = !draining && healthy.contains(&true);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json_response(status, &json!({ "ready": ready, "draining": draining, "upstreams": upstreams }))
}

/// `GET`, `HEAD` and `DELETE` of one dump, for clients without the directory. A dump that is a folder is answered with the
/// names of its files, and each of them under `<id>/<name>`.
async fn dump(app: &Arc<App>, method: &Method, path: &str) -> Response<Kind> {
    let (id, name) = path.split_once('/').map_or((path, None), |(id, name)| (id, Some(name)));
    let Ok(id) = id.parse::<RequestId>() else {
        let message =
            format!("`{id}` is not a request ID: expected a version 7 UUID in lower-case hyphenated form");
        return text(problem(StatusCode::BAD_REQUEST, message));
    };
    if app.dump_dirs.is_empty() {
        return text(problem(StatusCode::NOT_FOUND, "the proxy knows no dump directory; see --dump-dir"));
    }
    match *method {
        Method::GET | Method::HEAD => match open(app, id, name).await {
            Ok(Some(Opened::Folder(files))) => {
                text(json_response(StatusCode::OK, &json!({ "files": files })))
            }
            Ok(Some(Opened::File(file, len))) => {
                let mut response = Response::new(Kind::File(Box::new(FileBody::new(file, len))));
                let kind = HeaderValue::from_static("application/octet-stream");
                response.headers_mut().insert(CONTENT_TYPE, kind);
                response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(len));
                response
            }
            Ok(None) => {
                let what = name.map_or_else(String::new, |name| format!("file `{name}` in a "));
                text(problem(StatusCode::NOT_FOUND, format!("there is no {what}dump of {id}")))
            }
            Err(error) => {
                text(problem(StatusCode::INTERNAL_SERVER_ERROR, format!("the dump of {id}: {error}")))
            }
        },
        Method::DELETE if name.is_some() => {
            text(problem(StatusCode::BAD_REQUEST, format!("a dump is deleted whole: /tether/dumps/{id}")))
        }
        Method::DELETE if app.table.upstream(id).is_some() => {
            text(problem(StatusCode::CONFLICT, format!("the request {id} is in flight")))
        }
        Method::DELETE => match remove(app, id).await {
            Ok(true) => text(json_response(StatusCode::OK, &json!({ "deleted": id }))),
            Ok(false) => text(problem(StatusCode::NOT_FOUND, format!("there is no dump of {id}"))),
            Err(error) => {
                text(problem(StatusCode::INTERNAL_SERVER_ERROR, format!("the dump of {id}: {error}")))
            }
        },
        _ => {
            let mut response = problem(StatusCode::METHOD_NOT_ALLOWED, "GET, HEAD and DELETE are supported");
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD, DELETE"));
            text(response)
        }
    }
}

/// What stands under the path of a dump.
enum Opened {
    /// A file and its length.
    File(tokio::fs::File, u64),
    /// A folder of the legacy layout: the names of its files.
    Folder(Vec<String>),
}

/// The dump of `id`, or the file `name` in it if it is a folder.
async fn open(app: &App, id: RequestId, name: Option<&str>) -> std::io::Result<Option<Opened>> {
    let (dirs, name) = (app.dump_dirs.clone(), name.map(str::to_owned));
    let work = move || {
        for dir in &dirs {
            let path = dump_path(dir, id);
            match std::fs::File::open(&path) {
                Ok(_) if name.is_some() => return Ok(None),
                Ok(file) => return file_of(file).map(Some),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            let Some(files) = dump_files::legacy_files(dir, id)? else { continue };
            return match &name {
                None => Ok(Some(Opened::Folder(files))),
                // Only what was listed: a name cannot lead out of the folder.
                Some(name) if files.contains(name) => {
                    file_of(std::fs::File::open(dump_files::legacy_path(dir, id).join(name))?).map(Some)
                }
                Some(_) => Ok(None),
            };
        }
        Ok(None)
    };
    tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other)?
}

fn file_of(file: std::fs::File) -> std::io::Result<Opened> {
    let len = file.metadata()?.len();
    Ok(Opened::File(file.into(), len))
}

async fn remove(app: &App, id: RequestId) -> std::io::Result<bool> {
    let dirs = app.dump_dirs.clone();
    let work = move || dirs.iter().try_fold(false, |found, dir| Ok(found | dump_files::remove(dir, id)?));
    tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other)?
}
