// Package harness starts the real parts that tests run against: kube-apiserver
// with etcd, and Envoy. Each listens on loopback or a unix socket only, keeps
// its files in a temporary directory, and ends with the test that started it;
// should the test process die, the kernel kills them.
//
// The binaries are those that package tools names. Where one is missing a test
// skips and says so, unless FINGERPOST_REQUIRE_TOOLS=1 is set, as make test
// does: then it fails. Under go test -short no part is started and the test
// skips.
//
// A package that uses [SharedAPIServer] calls [Main] from its TestMain.
package harness
