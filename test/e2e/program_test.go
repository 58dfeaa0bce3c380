package e2e_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fingerpost/fingerpost/demo"
	"github.com/fingerpost/fingerpost/test/harness"
)

// programs are gRPC clients of each implementation with xDS: they do as they are
// told by lines, which tools/grpcio/client.py describes.
var programs = []struct {
	name    string
	command func(t *testing.T) []string
}{
	{"grpc-go", func(*testing.T) []string { return []string{goProgramEnv + "=1", os.Args[0]} }},
	{"grpcio", func(t *testing.T) []string {
		harness.Tool(t, "grpcio")
		// It polls while calls are under way, and else every 5 s by default.
		return []string{"GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS=100", "/usr/bin/python3", "../../tools/grpcio/client.py"}
	}},
	{"grpc-js", func(t *testing.T) []string {
		return []string{"NODE_PATH=" + filepath.Join(harness.Tool(t, "grpc-js-xds"), "node_modules"), "node", "../../tools/grpc-js-xds/client.js"}
	}},
}

// goProgramEnv makes the test's own binary the client of grpc-go, which reads
// its bootstrap when it starts.
const goProgramEnv = "FINGERPOST_E2E_GRPC_GO"

// goProgram is the client of grpc-go.
func goProgram() {
	p := goClient{conns: map[string]*grpc.ClientConn{}}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		value, err := p.do(strings.Fields(lines.Text()))
		if err != nil {
			s := status.Convert(err)
			fmt.Println(code.Code(s.Code()), strings.Join(strings.Fields(s.Message()), " "))
			continue
		}
		fmt.Println("ok", value)
	}
}

type goClient struct {
	conns  map[string]*grpc.ClientConn
	stream *demo.Stream
}

func (p *goClient) do(args []string) (string, error) {
	if args[0] == "ask" {
		return p.stream.Ask(args[1])
	}
	target, path := args[1], args[2]
	conn := p.conns[target]
	if conn == nil {
		var err error
		if conn, err = grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			return "", err
		}
		p.conns[target] = conn
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var out wrapperspb.StringValue
	switch args[0] {
	case "open":
		service, _, _ := strings.Cut(path[1:], "/")
		var err error
		p.stream, err = demo.Chat(context.Background(), conn, service)
		return "", err
	case "watch":
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, path)
		if err == nil {
			err = stream.SendMsg(wrapperspb.String(""))
		}
		if err == nil {
			err = stream.RecvMsg(&out)
		}
		return out.Value, err
	default:
		err := conn.Invoke(ctx, path, wrapperspb.String(""), &out, grpc.WaitForReady(args[0] == "probe"))
		return out.Value, err
	}
}

// program is a running client.
type grpcProgram struct {
	name string
	log  *output // what it and its library say on stderr

	// mu is held while it does what it was told.
	mu      sync.Mutex
	tell    io.Writer
	answers *bufio.Reader
}

// startProgram starts a client on the bootstrap that the agent's program prints
// for the pod that the id names.
func (s *site) startProgram(t *testing.T, name string, command []string, id string) *grpcProgram {
	t.Helper()
	conf, errs, exit := run(t, "bootstrap", "--format", "grpc", "--ads-socket", s.ads, "--node-id", id)
	if exit != 0 || errs != "" {
		t.Fatalf("fingerpost bootstrap: exit %d, %s", exit, errs)
	}
	file := filepath.Join(t.TempDir(), "bootstrap.json")
	if err := os.WriteFile(file, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/usr/bin/env", command...)
	cmd.Env = append(os.Environ(), "GRPC_XDS_BOOTSTRAP="+file)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &grpcProgram{name: name, log: &output{}}
	cmd.Stderr = p.log
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.tell, p.answers = in, bufio.NewReader(out)
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, bytes.TrimSpace([]byte(p.log.String())))
		}
	})
	return p
}

// do tells the client one line and returns its answer, or an error that begins
// with the call's code.
func (p *grpcProgram) do(format string, args ...any) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	line := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(p.tell, line); err != nil {
		return "", err
	}
	answer, err := p.answers.ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("%s has ended: %w", p.name, err)
	}
	verdict, text, _ := strings.Cut(strings.TrimSpace(answer), " ")
	if verdict != "ok" {
		return "", fmt.Errorf("%s %s (%s of %s)", verdict, text, line, p.name)
	}
	return text, nil
}
