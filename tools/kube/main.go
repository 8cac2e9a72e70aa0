// Command kube is etcd and the Kubernetes components in one binary, chosen by the name it is called by.
//
// The tests need a real API server, and a machine that reaches only package registries cannot download one.
// One binary shares the compiled Kubernetes packages between six programs: it is built in half the time of six.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func command(name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return controllermanager.NewControllerManagerCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	}
	return nil
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	cmd := command(name)
	if cmd == nil {
		fmt.Fprintf(os.Stderr, "%s: call me by the name of a component (etcd, kube-apiserver, ...), through a symlink\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(cmd))
}
