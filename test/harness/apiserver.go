package harness

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// APIServer is a kube-apiserver with its etcd and nothing else: no controller,
// no scheduler, no kubelet. Objects stay as they are written. Its methods are
// safe for concurrent use, save Stop and Restart.
type APIServer struct {
	// Config reaches the server as an administrator. Copy before changing.
	Config *rest.Config
	// Kubeconfig is the path of a file that says the same.
	Kubeconfig string
	// Client is the typed client on Config, without a rate limit.
	Client kubernetes.Interface

	dir     string
	bin     string
	args    []string
	etcdURL string
	token   string
	etcd    *process
	api     *process
}

// StartAPIServer starts a server of the test's own, stopped when the test
// ends: for tests that stop or restart it. Others use [SharedAPIServer].
func StartAPIServer(t testing.TB) *APIServer {
	t.Helper()
	s, err := startAPIServer(Tool(t, "etcd"), Tool(t, "kube-apiserver"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("tail of kube-apiserver's log:\n%s", s.api.tail())
		}
		s.close()
	})
	return s
}

var shared struct {
	once sync.Once // start happens once per process
	s    *APIServer
	err  error
}

// SharedAPIServer returns the one server of this test process, starting it at
// the first call. Tests keep apart by using a [APIServer.Namespace] each. The
// package's TestMain must call [Main].
func SharedAPIServer(t testing.TB) *APIServer {
	t.Helper()
	etcd, api := Tool(t, "etcd"), Tool(t, "kube-apiserver")
	shared.once.Do(func() { shared.s, shared.err = startAPIServer(etcd, api) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.s
}

// Main is a testing.M that stops the shared parts after the tests. It fits
// goleak.VerifyTestMain(harness.Main{M: m}) and os.Exit(harness.Main{M: m}.Run()).
type Main struct{ M *testing.M }

// Run runs the tests and returns their exit code.
func (m Main) Run() int {
	code := m.M.Run()
	if shared.s != nil {
		shared.s.close()
	}
	return code
}

// startAPIServer tries a few times, since ports found free may be taken by
// another program before the servers listen.
func startAPIServer(etcd, api string) (s *APIServer, err error) {
	for range 3 {
		if s, err = tryAPIServer(etcd, api); err == nil {
			return s, nil
		}
	}
	return nil, err
}

func tryAPIServer(etcdBin, apiBin string) (_ *APIServer, err error) {
	dir, err := os.MkdirTemp("", "apiserver-")
	if err != nil {
		return nil, err
	}
	s := &APIServer{dir: dir, bin: apiBin}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	var port [3]int
	for i := range port {
		if port[i], err = freePort(); err != nil {
			return nil, err
		}
	}
	client := "http://127.0.0.1:" + strconv.Itoa(port[0])
	s.etcdURL = client
	peer := "http://127.0.0.1:" + strconv.Itoa(port[1])
	s.etcd, err = start(dir, "etcd", etcdBin,
		"--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	if err != nil {
		return nil, err
	}
	if err := s.configure(client, port[2]); err != nil {
		return nil, err
	}
	return s, s.startAPI()
}

// configure writes the files of the API server and sets its arguments.
func (s *APIServer) configure(etcd string, port int) error {
	raw := make([]byte, 16)
	if _, err := rand.Read(raw); err != nil {
		return err
	}
	s.token = hex.EncodeToString(raw)
	tokens, key := filepath.Join(s.dir, "tokens.csv"), filepath.Join(s.dir, "service-account.key")
	if err := os.WriteFile(tokens, []byte(s.token+",admin,admin,system:masters\n"), 0o600); err != nil {
		return err
	}
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		return err
	}
	if err := os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		return err
	}
	certs := filepath.Join(s.dir, "certs") // kube-apiserver signs its own certificate there
	s.args = []string{
		"--etcd-servers=" + etcd, "--storage-media-type=application/vnd.kubernetes.protobuf",
		"--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + strconv.Itoa(port), "--cert-dir=" + certs,
		"--token-auth-file=" + tokens, "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + key, "--service-account-signing-key-file=" + key,
		"--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112",
		// Pods are created without a controller that makes their accounts, and
		// loopback is no address for the endpoints of the kubernetes Service.
		"--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none",
		"--allow-privileged", "--profiling=false",
	}
	s.Config = &rest.Config{
		Host:            "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		BearerToken:     s.token,
		TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(certs, "apiserver.crt")},
		QPS:             -1,
	}
	s.Kubeconfig = filepath.Join(s.dir, "kubeconfig")
	return nil
}

// startAPI starts kube-apiserver and returns when it is ready.
func (s *APIServer) startAPI() (err error) {
	if s.api, err = start(s.dir, "kube-apiserver", s.bin, s.args...); err != nil {
		return err
	}
	return poll(60*time.Second, func() error {
		for _, p := range []*process{s.etcd, s.api} {
			if err := p.exited(); err != nil {
				return errors.Join(errGiveUp, err)
			}
		}
		if s.Client == nil {
			if err := s.connect(); err != nil {
				return err
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		body, err := s.Client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err != nil {
			return fmt.Errorf("kube-apiserver is not ready: %w\n%s\n%s", err, body, s.api.tail())
		}
		return nil
	})
}

// connect makes the client and the kubeconfig, once the certificate is there.
func (s *APIServer) connect() error {
	ca, err := os.ReadFile(s.Config.CAFile)
	if err != nil {
		return err
	}
	config := clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"test": {Server: s.Config.Host, CertificateAuthorityData: ca}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"admin": {Token: s.token}},
		Contexts:       map[string]*clientcmdapi.Context{"test": {Cluster: "test", AuthInfo: "admin"}},
		CurrentContext: "test",
	}
	if err := clientcmd.WriteToFile(config, s.Kubeconfig); err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(s.Config)
	if err != nil {
		return err
	}
	s.Client = client
	return nil
}

// Stop ends kube-apiserver, hard, as if its machine had gone: connections break
// and new ones are refused. What etcd holds stays.
func (s *APIServer) Stop() { s.api.kill() }

// Restart starts kube-apiserver again at the same address with the same
// contents, and returns when it is ready.
func (s *APIServer) Restart(t testing.TB) {
	t.Helper()
	if err := s.Again(); err != nil {
		t.Fatal(err)
	}
}

// close ends both processes and removes their files.
func (s *APIServer) close() {
	if s.api != nil {
		s.api.kill()
	}
	if s.etcd != nil {
		s.etcd.kill()
	}
	if s.Client != nil {
		CloseIdleConnections(s.Config)
	}
	_ = os.RemoveAll(s.dir)
}

// CloseIdleConnections closes what the cached transport of the config keeps
// open, for goroutine-leak checks: clients on one config share a transport.
func CloseIdleConnections(c *rest.Config) {
	if rt, err := rest.TransportFor(c); err == nil {
		for {
			switch v := rt.(type) {
			case interface{ CloseIdleConnections() }:
				v.CloseIdleConnections()
				return
			case interface{ WrappedRoundTripper() http.RoundTripper }:
				rt = v.WrappedRoundTripper()
			default:
				return
			}
		}
	}
}
