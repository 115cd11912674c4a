use tether_dump::{RequestId, dump_path};

use crate::support::{Proxy, Upstream, dumps, publish};

#[tokio::test]
async fn clients_without_the_directory_read_and_delete_dumps_over_http() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dumps");
    let upstream = Upstream::plain().await;
    let proxy = Proxy::start(&[&upstream], &["--dump-dir", dir.to_str().unwrap()]).await;
    let id = RequestId::new();
    let tokens: Vec<i64> = (0..50_000).collect();
    publish(&dir, id, id, &tokens);
    let bytes = std::fs::read(dump_path(&dir, id)).unwrap();

    let path = format!("/tether/dumps/{id}");
    let reply = proxy.get(&path).await;
    assert_eq!((reply.status(), reply.header("content-length")), (200, Some(&*bytes.len().to_string())));
    assert!(reply.body == bytes, "the dump came changed");
    assert_eq!(proxy.request("DELETE", &path).await.status(), 200);
    assert_eq!(dumps(&dir), 0);
    assert_eq!(proxy.request("DELETE", &path).await.status(), 404);
    assert_eq!(proxy.get(&path).await.status(), 404);
    assert_eq!(proxy.request("PUT", &path).await.status(), 405);
    for bad in ["..%2f..%2fetc%2fpasswd", "../../etc/passwd", &id.to_string().to_uppercase(), ""] {
        assert_eq!(proxy.get(&format!("/tether/dumps/{bad}")).await.status(), 400, "{bad}");
    }
    assert!(upstream.requests().is_empty());
}
