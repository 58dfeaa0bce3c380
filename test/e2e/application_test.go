package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/fingerpost/fingerpost/demo"
)

// errandEnv makes the test's own binary an application, which runs the errand that
// it holds.
const errandEnv = "FINGERPOST_E2E_ERRAND"

// errand is what an application is to do: to call the service once at each target,
// each by a connection of its own, as many at a time as it has workers. Its answers
// are in the order of the targets.
type errand struct {
	Service string
	Targets []string
	Workers int
	Chat    bool // three questions on a stream as well
	// ResolvConf is its /etc/resolv.conf; if empty it is that of the machine.
	ResolvConf string
}

// mappedPrefix begins targets to which a socket of IPv6 is connected by the v4-mapped
// address, as a JVM does it; grpc-go would take one of IPv4.
const mappedPrefix = "mapped:"

// answer is what came of one target.
type answer struct {
	Said string   // who answered
	Chat []string // what the stream said
	Peer string   // what the application takes the peer's address for
	Err  string
}

// run runs the errand as a process of the pod.
func (c *caller) run(e errand) []answer {
	c.t.Helper()
	text, err := json.Marshal(e)
	if err != nil {
		c.t.Fatal(err)
	}
	cgroup, err := os.Open(c.cgroup)
	if err != nil {
		c.t.Fatal(err)
	}
	defer cgroup.Close()
	var out, errs bytes.Buffer
	// The errand comes by a file: an environment is bounded.
	file := filepath.Join(c.t.TempDir(), "errand")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.CommandContext(c.t.Context(), os.Args[0]) // each of its calls has a deadline
	cmd.Env = []string{errandEnv + "=" + file}            // of no proxy
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	if err := c.network.Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	var all []answer
	if err := cmd.Wait(); err != nil {
		c.t.Fatalf("the application in %s: %v\n%s", c.id, err, errs.String())
	}
	if err := json.Unmarshal(out.Bytes(), &all); err != nil || len(all) != len(e.Targets) {
		c.t.Fatalf("the application in %s says %q: %v", c.id, out.String(), err)
	}
	return all
}

// application is the process of an errand.
func application(file string) {
	if err := runErrand(file); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func runErrand(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var e errand
	if err := json.Unmarshal(text, &e); err != nil {
		return err
	}
	if e.ResolvConf != "" {
		// The mounts are this process's own.
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount(e.ResolvConf, "/etc/resolv.conf", "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	all := make([]answer, len(e.Targets))
	next := make(chan int)
	var workers sync.WaitGroup
	for range e.Workers {
		workers.Go(func() {
			for i := range next {
				if err := e.call(e.Targets[i], &all[i]); err != nil {
					all[i].Err = err.Error()
				}
			}
		})
	}
	for i := range all {
		next <- i
	}
	close(next)
	workers.Wait()
	return json.NewEncoder(os.Stdout).Encode(all)
}

func (e *errand) call(target string, a *answer) error {
	options := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if addr, ok := strings.CutPrefix(target, mappedPrefix); ok {
		target = "passthrough:///" + addr
		options = append(options, grpc.WithContextDialer(dialMapped))
	}
	conn, err := grpc.NewClient(target, options...)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	var p peer.Peer
	if a.Said, err = demo.Say(ctx, conn, e.Service, grpc.Peer(&p)); err != nil {
		return err
	}
	a.Peer = p.Addr.String()
	if !e.Chat {
		return nil
	}
	stream, err := demo.Chat(ctx, conn, e.Service)
	if err != nil {
		return err
	}
	for i := range 3 {
		said, err := stream.Ask(fmt.Sprint(i))
		if err != nil {
			return err
		}
		a.Chat = append(a.Chat, said)
	}
	return nil
}

func dialMapped(_ context.Context, addr string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), addr)
	defer f.Close()
	if err := unix.Connect(fd, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}); err != nil {
		return nil, err
	}
	return net.FileConn(f)
}
